"""Answers that are equal as expressions, where the extra math-verify is installed; where it is not, the refusal."""

import importlib.util
import time
from dataclasses import replace

import pytest

from skyrl_async.errors import ConfigError
from skyrl_async.rewards import math_answers
from skyrl_async.rewards.math_answers import LIMITS, is_equal_answer
from skyrl_async.tasks.registry import make_environment
from tests.patience import PATIENCE_S

is_installed = importlib.util.find_spec("math_verify") is not None
needs_package = pytest.mark.skipif(not is_installed, reason="needs the extra math-verify")
ROW = {"reward_spec": {"ground_truth": r"\frac{\sqrt{3}}{2}"}}


@pytest.mark.skipif(is_installed, reason="math-verify is installed")
def test_a_missing_package_is_named_with_the_extra_that_installs_it_and_what_does_without() -> None:
    with pytest.raises(
        ConfigError, match=r"math-verify, .* skyrl-async\[math-verify\] .*, or use env_class=math, which"
    ):
        make_environment("math_verify", ROW)


@pytest.mark.parametrize(
    ("answer", "truth", "is_equal"),
    [
        ("0.5", r"\frac{1}{2}", True),
        ("5", "6", False),
        ("1" * 501, "x", False),
        ("1" * 5000, "1", False),
        (f"1{'%' * 3000}", "1", False),
        ("3 hours", "3 minutes", False),
        ("x=1", "y=1", False),
    ],
)
def test_what_can_be_told_without_computing_takes_no_process(
    answer: str, truth: str, is_equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(math_answers, "call_function")
    assert is_equal_answer(answer, truth) is is_equal


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "truth", "is_equal"),
    [
        (r"\sqrt{3}/2", r"\frac{\sqrt{3}}{2}", True),
        ("2^{10}", "1024", True),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"\sqrt{2}+1", r"1+\sqrt{2}", True),
        (r"\sqrt{2}", r"\sqrt{3}", False),
        ("(1,x)", "(x,1)", False),
        ("nothing at all", "x+1", False),
    ],
)
def test_expressions_are_equal_by_their_value(answer: str, truth: str, is_equal: bool) -> None:
    assert is_equal_answer(answer, truth) is is_equal


@needs_package
@pytest.mark.slow
def test_an_answer_that_would_take_for_ever_is_wrong_after_a_while() -> None:
    started = time.monotonic()
    assert not is_equal_answer("9^{9^{9^{9}}}+x", "x", limits=replace(LIMITS, cpu_s=4))
    assert time.monotonic() - started < LIMITS.wall_s + PATIENCE_S


@needs_package
@pytest.mark.slow
def test_the_environment_rewards_the_boxed_expression() -> None:
    assert not make_environment("math_verify", ROW).is_fast
    assert make_environment("math_verify", ROW).step(r"so \boxed{\sqrt{3}/2}")["reward"] == 1.0
    assert make_environment("math_verify", ROW).step(r"so \boxed{\sqrt{2}/2}")["reward"] == 0.0
    assert make_environment("math", ROW).step(r"so \boxed{\sqrt{3}/2}")["reward"] == 0.0
