r"""When two mathematical answers are equal as expressions: ``\sqrt{3}/2`` and ``\frac{\sqrt{3}}{2}``, ``(x+1)^2`` and ``x^2+2x+1``.

What ``math_answers`` can tell is told by that. The rest is computed by the package math-verify, which has sympy evaluate what a policy
wrote: it may run code, and for ever, hence it does so in the sandbox.

Flows in: two answers. Flows out: whether they are equal. This module does not know rows or environments.
"""

from importlib.util import find_spec

from skyrl_async.errors import ConfigError
from skyrl_async.rewards.math_answers import MAX_CHARACTERS, as_rational, is_same_answer, normalised
from skyrl_async.rewards.sandbox import Limits, call_function, require_sandbox

LIMITS = Limits(cpu_s=10, wall_s=30.0, memory_mb=2048)
"""Of one comparison, of which importing sympy is the most. An answer that needs more is wrong."""
_PROGRAM = """
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

def is_equal(answer, truth):
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    found, right = (parse(f"${text}$", extraction_config=kinds, parsing_timeout=None) for text in (answer, truth))
    return verify(right, found, timeout_seconds=None)
"""


def require_math_verify() -> None:
    """Raise ``ConfigError`` where math-verify is not installed, or what it runs cannot be confined."""
    if find_spec("math_verify") is None:
        raise ConfigError(
            "env_class=math_verify needs the package math-verify, which is not installed: install skyrl-async[math-verify] "
            "(uv run --extra math-verify ...), or use env_class=math, which evaluates nothing"
        )
    require_sandbox()


def is_equal_answer(answer: str, truth: str, *, limits: Limits = LIMITS) -> bool:
    """Whether two answers are equal. Blocks for seconds, unless they are the same, or two numbers.

    Raises ``GenerationError`` where the sandbox could not be set up.
    """
    if is_same_answer(answer, truth):
        return True
    are_numbers = all(as_rational(normalised(text)) is not None for text in (answer, truth))
    if are_numbers or max(len(answer), len(truth)) > MAX_CHARACTERS:
        return False
    _, results = call_function(_PROGRAM, "is_equal", [(answer, truth)], limits=limits)
    return results == [True]
