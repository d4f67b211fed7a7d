"""Scores of reasoning-gym, computed in the sandbox: many of its scorers evaluate the answer as Python, or with sympy.

An answer may hence run code, take for ever, or make the scorer raise. Whatever it does costs that answer its score and nothing else.

Flows in: which dataset, an item of it, and an answer. Flows out: the score, or why there is none. This module does not import the
package, and does not know environments.
"""

import base64
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_async.rewards.sandbox import Limits, call_function

LIMITS = Limits(cpu_s=5, wall_s=30.0, memory_mb=2048)
"""Of one score. An answer that needs more scores nothing."""

# Importing the package whole takes seconds, most of it for matplotlib, which one dataset's dependency draws with. Hence the packages on
# the way to the dataset's module stay empty, and what would draw does too.
_PROGRAM = """
import base64, importlib, importlib.util, pickle, sys, types

class Empty(types.ModuleType):
    def __getattr__(self, name):
        return None

DRAWING = ("matplotlib", "matplotlib.animation", "matplotlib.collections", "matplotlib.pyplot", "mpl_toolkits", "mpl_toolkits.mplot3d")

def score(module, name, config, seed, size, item, answer):
    sys.modules.update({drawing: Empty(drawing) for drawing in DRAWING})
    packages = module.split(".")[:-1]
    for depth in range(1, len(packages) + 1):
        package = ".".join(packages[:depth])
        spec = importlib.util.find_spec(package) or sys.exit(f"{package} is not found here")
        sys.modules[package] = importlib.util.module_from_spec(spec)
    importlib.import_module("reasoning_gym.coaching")
    importlib.import_module(module)
    dataset = importlib.import_module("reasoning_gym.factory").create_dataset(name, seed=seed, size=size, **config)
    item = pickle.loads(base64.b64decode(item))
    try:
        return float(dataset.score_answer(answer, item))
    except Exception as error:
        return f"the scorer raised {type(error).__name__}: {error}"[:300]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredDataset:
    """Names a dataset of reasoning-gym."""

    module: str
    """The dotted name of the module that defines its class."""
    name: str
    config: Mapping[str, Any]
    seed: int
    size: int


def sandboxed_score(
    dataset: ScoredDataset, item: Mapping[str, Any], answer: str, *, limits: Limits = LIMITS
) -> tuple[float, str | None]:
    """Return the dataset's score of an answer, in [0, 1], and None; or 0.0 and why there is none. Blocks for some tenths of a second.

    Args:
        item: as the dataset drew it in this process. It is handed over, because some datasets draw another one in another process.

    Raises:
        GenerationError: the sandbox could not be set up.
    """
    handed = base64.b64encode(pickle.dumps(dict(item))).decode()
    arguments = (dataset.module, dataset.name, dict(dataset.config), dataset.seed, dataset.size, handed, answer)
    outcome, results = call_function(_PROGRAM, "score", [arguments], limits=limits)
    if results is None:
        return 0.0, outcome.failure or "the score is no JSON"
    score = results[0]
    if isinstance(score, str):
        return 0.0, score
    if not isinstance(score, float) or not math.isfinite(score) or not 0.0 <= score <= 1.0:
        return 0.0, f"the score must be a number in [0, 1], got {str(score)[:100]}"
    return score, None
