"""Tests programs of a policy on inputs with expected outputs.

Two forms are read. APPS and its descendants have ``{"inputs": [...], "outputs": [...]}``: texts for standard input and output, or,
with ``"fn_name"``, arguments and results of a function. LiveCodeBench has a list of ``{"input", "output", "testtype"}``.

Programs find the names of the usual modules (``List``, ``deque``, ``math``), and the limits of recursion and of an integer's digits that
LiveCodeBench's grader gives them.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from typing import Any

from skyrl_async.rewards.sandbox import Limits, call_function, run_program

_FENCE = "```"
_PYTHON = frozenset({"python", "python3", "py"})
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
# The import of the modules restores datetime, which is also a class.
_STARS = [f"from {module} import *" for module in (*_MODULES, "typing")]
_NAMES = "\n".join(
    [*_STARS, f"import {', '.join(_MODULES)}", "sys.setrecursionlimit(50000)", "sys.set_int_max_str_digits(50000)"]
)
# They become builtins, for the function to be tested (gcd) must be the program's own.
_PREPARATION = "\n".join(
    (
        f"import builtins\nnames = {{}}\nexec({_NAMES!r}, names)",
        "for item in names.items():\n  vars(builtins).setdefault(*item)",
        "del builtins, names, item",
    )
)
RELATIVE_TOLERANCE = 1e-6
_DECIMAL = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE][+-]))(?:[eE][+-]?\d{1,3})?")
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests:
    """The tests of one row."""

    function: str | None
    """The function to call; None: the program reads standard input and writes standard output."""
    inputs: tuple[Any, ...]
    """Per test: a text, or a list of arguments."""
    outputs: tuple[Any, ...]
    """Per test: a text, or a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a program's tests."""

    num_passed: int
    num_tests: int
    reason: str | None
    """Why the first failing test fails; None if all pass."""


def program_in(text: str) -> str | None:
    """Return the last fenced block tagged as Python in ``text``, else the last without a tag; None without either.

    Time is linear in the length of ``text``.
    """
    pieces = text.split(_FENCE)
    blocks = [_block(piece) for piece in pieces[1:-1]]
    tagged = [body for language, body in blocks if language in _PYTHON]  # also after a fence without a partner
    untagged = [body for language, body in blocks[::2] if not language]
    return next(reversed(tagged or untagged), None)


def read_tests(ground_truth: Any) -> CodeTests:
    """Return the tests in ``ground_truth``, a JSON text or its value. Raises ``ValueError`` that says what is wrong with it."""
    found = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(found, Mapping):
        tests = _apps_tests(found)
    elif isinstance(found, Sequence) and all(isinstance(test, Mapping) for test in found):
        tests = _live_code_bench_tests(found)
    else:
        raise ValueError(f"tests must be an object with inputs and outputs, or a list of objects, got {_shown(found)}")
    if not tests.inputs or len(tests.inputs) != len(tests.outputs):
        raise ValueError(
            f"tests must have as many outputs as inputs, and some, got {len(tests.inputs)} and {len(tests.outputs)}"
        )
    return tests


def judge_program(source: str, tests: CodeTests, limits: Limits | None = None) -> Verdict:
    """Run ``source`` on ``tests``; blocks as ``run_program`` does. Standard input is tested until the first failure."""
    # A text of its own for the compiler keeps the numbers of its lines, and may begin with a __future__ import.
    source = f"{_PREPARATION}\nexec(compile({source!r}, 'program.py', 'exec'))"
    if tests.function is not None:
        return _judge_function(source, tests, tests.function, limits)
    for index, (given, expected) in enumerate(zip(tests.inputs, tests.outputs, strict=True)):
        outcome = run_program(source, stdin=given, limits=limits)
        reason = outcome.failure
        if reason is None and not is_same_output(outcome.output, expected):
            reason = f"wrote {_shown(outcome.output)} instead of {_shown(expected)}"
        if reason is not None:
            return Verdict(
                num_passed=index, num_tests=len(tests.inputs), reason=f"test {index + 1} ({_shown(given)}): {reason}"
            )
    return Verdict(num_passed=len(tests.inputs), num_tests=len(tests.inputs), reason=None)


def is_same_output(output: str, expected: str) -> bool:
    """Whether two texts have the same words in the same lines, empty lines at both ends aside, as LiveCodeBench's grader does.

    Two decimals (``0.5`` and ``0.50``) are the same within 1e-6 of their size; APPS' and verl's graders have a tolerance, too.
    """
    left, right = _words(output), _words(expected)
    return list(map(len, left)) == list(map(len, right)) and all(
        map(_is_same_word, chain.from_iterable(left), chain.from_iterable(right))
    )


def _is_same_word(left: str, right: str) -> bool:
    if left == right or not (_DECIMAL.fullmatch(left) and _DECIMAL.fullmatch(right)):
        return left == right
    numbers = Decimal(left), Decimal(right)
    return abs(numbers[0] - numbers[1]) <= Decimal(str(RELATIVE_TOLERANCE)) * max(map(abs, numbers))


def is_same_result(result: Any, expected: Any) -> bool:
    """Whether two JSON values are equal: integers exactly, floats within 1e-6 of each other, relatively.

    A float beside an integer has to round to it too, so that a guess as a float earns no more than one as an integer.
    """
    if isinstance(result, bool) or isinstance(expected, bool):
        return result is expected
    if isinstance(result, int | float) and isinstance(expected, int | float):
        return _is_same_number(result, expected)
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(map(is_same_result, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(is_same_result(result[key], expected[key]) for key in result)
    return bool(result == expected)


def _is_same_number(left: float, right: float) -> bool:
    if left == right or (isinstance(left, int) and isinstance(right, int)):
        return left == right
    try:
        is_close = math.isclose(left, right, rel_tol=RELATIVE_TOLERANCE)
    except OverflowError:  # an integer beyond all floats
        return False
    has_integer = isinstance(left, int) or isinstance(right, int)
    return is_close and (not has_integer or round(left) == round(right))


def _judge_function(source: str, tests: CodeTests, function: str, limits: Limits | None) -> Verdict:
    outcome, results = call_function(source, function, tests.inputs, limits=limits)
    num_tests = len(tests.inputs)
    if results is None:
        return Verdict(num_passed=0, num_tests=num_tests, reason=outcome.failure or "a result is no JSON")
    # APPS writes a single result as a list of one.
    is_right = [
        is_same_result(result, expected) or is_same_result([result], expected)
        for result, expected in zip(results, tests.outputs, strict=True)
    ]
    wrong = next((index for index, right in enumerate(is_right) if not right), None)
    reason = None
    if wrong is not None:
        call = f"{function}({', '.join(map(repr, tests.inputs[wrong]))})"
        reason = f"{_shown(call)} returned {_shown(results[wrong])} instead of {_shown(tests.outputs[wrong])}"
    return Verdict(num_passed=sum(is_right), num_tests=num_tests, reason=reason)


def _apps_tests(found: Mapping[str, Any]) -> CodeTests:
    if not isinstance(found.get("inputs"), list) or not isinstance(found.get("outputs"), list):
        raise ValueError(f"tests must have lists inputs and outputs, got {_shown(found)}")
    function = found.get("fn_name")
    if function is None:
        return CodeTests(function=None, inputs=_texts(found["inputs"]), outputs=_texts(found["outputs"]))
    wrong = [arguments for arguments in found["inputs"] if not isinstance(arguments, list)]
    if wrong:
        raise ValueError(f"with fn_name, inputs must hold a list of arguments per call, got {_shown(wrong[0])}")
    return CodeTests(function=str(function), inputs=tuple(found["inputs"]), outputs=tuple(found["outputs"]))


def _live_code_bench_tests(found: Sequence[Mapping[str, Any]]) -> CodeTests:
    missing = next((test for test in found if "input" not in test or "output" not in test), None)
    if missing is not None:
        raise ValueError(f"a test must have input and output, got {_shown(missing)}")
    inputs, outputs = [test["input"] for test in found], [test["output"] for test in found]
    if not any(test.get("testtype") == "functional" for test in found):
        return CodeTests(function=None, inputs=_texts(inputs), outputs=_texts(outputs))
    metadata = found[0].get("metadata")
    function = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    if not function:
        raise ValueError(f"a functional test must have metadata.func_name, got {_shown(found[0])}")
    arguments = tuple([_value_of(line) for line in str(text).splitlines() if line.strip()] for text in inputs)
    return CodeTests(function=str(function), inputs=arguments, outputs=tuple(map(_value_of, outputs)))


def _value_of(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a functional test must have JSON texts, one argument a line, as input and output, got {_shown(text)}: {error}"
        ) from error


def _block(fenced: str) -> tuple[str, str]:
    """The language that a fence names, and what is below that line."""
    first_line, _, body = fenced.partition("\n")
    words = first_line.split()
    return words[0].lower() if words else "", body


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    """Texts as they are; a list of lines is joined, as some sets have it."""
    return tuple("\n".join(map(str, value)) if isinstance(value, list) else str(value) for value in values)


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().split("\n")]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
