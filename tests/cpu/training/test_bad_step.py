"""A loss or gradient that is not finite on one of two ranks: both stop, and write the rows of the step."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_async.errors import TrainingError
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.dispatch import split_work
from tests.cpu.tiny_policies import trajectories, write_policy
from tests.cpu.two_ranks import NUM_RANKS, OneOfTwo, RankPair

ADVANTAGES = (math.nan, 1.0, -1.0, 0.5)
VERSION = 7
NEVER_RAISED = "nothing was raised"


def said(call: Callable[..., object], *arguments: object) -> str:
    try:
        call(*arguments)
    except TrainingError as error:
        return str(error)
    return NEVER_RAISED


async def on_two_ranks(make: Callable[[TrainingSettings], OneOfTwo], directory: Path) -> None:
    """Each rank leaves what its calls said: with a place to write to, and without."""
    for name in ("bad_step", "file/bad_step"):
        settings = TrainingSettings(policy_path=str(directory / "policy"), bad_step_dir=str(directory / name))
        policy = make(settings)
        works = split_work(trajectories(4, seed=1), ADVANTAGES, VERSION, settings=settings, num_ranks=NUM_RANKS)
        lines = [said(policy.rank.forward_backward, works[policy.index]), said(policy.rank.step, 10.0)]
        (directory / f"{name.replace('/', '_')}_{policy.index}.json").write_text(json.dumps(lines))
        await policy.close()


@pytest.fixture(scope="module")
def two_ranks(rank_pair: RankPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two_ranks")
    write_policy(directory / "policy")
    (directory / "file").write_text("where a directory should be")
    rank_pair.run(on_two_ranks, directory)
    return directory


def lines_of(directory: Path, name: str) -> tuple[list[str], list[str]]:
    """What every rank said of the loss, and of the step."""
    found = [json.loads((directory / f"{name}_{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    return [loss for loss, _ in found], [step for _, step in found]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_rank_stops_both_and_leaves_the_rows_of_both(two_ranks: Path) -> None:
    losses, steps = lines_of(two_ranks, "bad_step")
    files = [two_ranks / "bad_step" / f"version_{VERSION:06d}_rank_{rank}.jsonl" for rank in range(NUM_RANKS)]
    where = f"The step's rows, with their log-probs and advantages, are in {files[0]} and {files[1]}"
    assert len(set(losses)) == 1
    assert f" rows at version {VERSION} is nan on rank " in losses[0] and losses[0].endswith(f". {where}")
    assert all("norm is nan" in step and step.endswith(f". {where}") for step in steps)
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    pairs = zip(trajectories(4, seed=1), ADVANTAGES, strict=True)
    expected = {tuple(row.response_token_ids.tolist()): value for row, value in pairs}
    found = {tuple(row["response_token_ids"]): row["advantages"][0] for row in rows}
    assert {ids: str(value) for ids, value in found.items()} == {ids: str(value) for ids, value in expected.items()}


@pytest.mark.slow
def test_rows_that_cannot_be_written_do_not_hide_why_they_should_be(two_ranks: Path) -> None:
    for line in (line for lines in lines_of(two_ranks, "file_bad_step") for line in lines):
        assert " is nan " in line and "rows, with their log-probs and advantages, are lost" in line
        for rank in range(NUM_RANKS):
            assert f"; those of rank {rank} could not be written: " in line
