"""What becomes of a score that the sandbox hands back, whatever is in it."""

import pytest

from skyrl_async.environments import reasoning_gym
from skyrl_async.rewards import confinement
from skyrl_async.rewards.sandbox import Limits

pytestmark = pytest.mark.skipif(not confinement.is_supported(), reason="needs Linux on x86_64 or aarch64")

ITEM = {"dataset": "chess", "config": {}, "seed": 0, "size": 1, "index": 0}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "LIMITS", Limits(cpu_s=2, wall_s=120.0))


@pytest.mark.parametrize(
    ("body", "score", "reason"),
    [
        ("return 0.25", 0.25, None),
        ("return float('nan')", 0.0, "a number in [0, 1], got nan"),
        *(
            pytest.param(f"return {value}", 0.0, f"a number in [0, 1], got {shown}", marks=pytest.mark.slow)
            for value, shown in (("float('inf')", "inf"), ("1e9", "1000000000.0"), ("[1.0]", "[1.0]"))
        ),
        ("return 'the scorer raised KeyError: 0'", 0.0, "the scorer raised KeyError: 0"),
        ("raise SystemExit('bye')", 0.0, "exit code 1: bye"),
    ],
)
def test_only_a_number_from_0_to_1_is_a_score(
    body: str, score: float, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reasoning_gym, "_PROGRAM", f"def score(*arguments):\n    {body}")
    found = reasoning_gym.sandboxed_score("reasoning_gym.games.chess", ITEM, {"answer": (1, 2)}, "e4")
    assert found[0] == score
    assert found[1] is None if reason is None else reason in str(found[1])


def test_a_package_that_the_sandbox_cannot_read_is_named() -> None:
    found = reasoning_gym.sandboxed_score("no_such_package.chess", ITEM, {}, "e4")
    assert found == (0.0, "exit code 1: no_such_package is not found here")
