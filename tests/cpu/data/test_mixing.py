"""Weights of sources: how often each row is in an epoch, counted."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.chat import ChatRenderer
from skyrl_async.composition.data import Prompts, fitting_prompts, num_planned_steps, prepare_prompts
from skyrl_async.config.load import from_overrides
from skyrl_async.data.dataloader import EpochPlan, _AsyncDataloader, weighted
from skyrl_async.errors import CheckpointError, ConfigError, DatasetError
from skyrl_async.types import Prompt
from tests.cpu.chat_templates import mistral
from tests.cpu.config.test_config import policy_directory
from tests.cpu.data.test_dataset import write_rows


def source(name: str, num_rows: int) -> list[Prompt]:
    message = {"role": "user", "content": "?"}
    return [Prompt(uid=f"{name}{i}", messages=(message,), env_class="relay") for i in range(num_rows)]


def mixed(*sources: tuple[list[Prompt], float], seed: int = 0) -> tuple[list[Prompt], EpochPlan]:
    pairs = [weighted(*one) for one in sources]
    prompts = [prompt for found, _ in pairs for prompt in found]
    rotations = [rotation for _, rotation in pairs if rotation is not None]
    return prompts, EpochPlan([prompt.uid for prompt in prompts], rotations, seed=seed)


def test_a_weight_of_one_is_every_row_once_under_its_own_uid() -> None:
    prompts, plan = mixed((source("a", 3), 1.0), (source("b", 2), 1))
    assert [prompt.uid for prompt in prompts] == plan.of_epoch(0) == plan.of_epoch(7) == ["a0", "a1", "a2", "b0", "b1"]
    assert plan.is_whole


def test_a_weight_of_two_is_every_row_twice_under_two_uids() -> None:
    prompts, plan = mixed((source("a", 2), 2.0))
    assert plan.of_epoch(3) == ["a0", "a1", "a0~2", "a1~2"]
    assert [prompt.messages for prompt in prompts[:2]] == [prompt.messages for prompt in prompts[2:]]


def test_a_weight_of_a_quarter_is_every_row_once_in_four_epochs() -> None:
    _, plan = mixed((source("a", 12), 0.25), (source("b", 3), 1.0))
    epochs = [plan.of_epoch(epoch) for epoch in range(8)]
    assert all(len([uid for uid in epoch if uid[0] == "a"]) == 3 for epoch in epochs)
    assert all({"b0", "b1", "b2"} <= set(epoch) for epoch in epochs)
    for four in (epochs[:4], epochs[4:]):
        assert Counter(uid for epoch in four for uid in epoch if uid[0] == "a") == {f"a{i}": 1 for i in range(12)}


@given(
    num_rows=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 3.5), min_size=4, max_size=4),
    seed=st.integers(0, 9),
)
def test_epochs_have_the_same_size_no_uid_twice_and_rows_of_a_source_equally_often(
    num_rows: list[int], weights: list[float], seed: int
) -> None:
    sources = [(source(name, num), weight) for name, num, weight in zip("abcd", num_rows, weights, strict=False)]
    prompts, plan = mixed(*sources, seed=seed)
    assert len({prompt.uid for prompt in prompts}) == len(prompts)
    epochs = [plan.of_epoch(epoch) for epoch in range(20)]
    assert all(len(set(epoch)) == len(epoch) == len(plan) for epoch in epochs)
    times = Counter(uid.partition("~")[0] for epoch in epochs for uid in epoch)
    for rows, weight in sources:
        counts = [times[prompt.uid] for prompt in rows]
        assert max(counts) - min(counts) <= 1
        # Rounding to whole rows, and one row at least, in each of 20 epochs.
        assert sum(counts) == pytest.approx(20 * weight * len(rows), abs=20)


def test_the_order_of_a_rotation_depends_on_the_seed() -> None:
    plans = [mixed((source("a", 40), 0.1), seed=seed)[1].of_epoch(0) for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]


def test_prompts_left_out_as_too_long_are_in_no_rotation() -> None:
    _, rotation = weighted(source("a", 4), 0.5)
    assert rotation is not None
    plan = EpochPlan(["a0", "a3"], [rotation])
    assert len(plan) == 1 and {plan.of_epoch(0)[0], plan.of_epoch(1)[0]} == {"a0", "a3"}


async def drawn(loader: _AsyncDataloader, num: int) -> list[tuple[int, str]]:
    keys = []
    for _ in range(num):
        found = await loader.get_next_non_consumed_data()
        assert found is not None
        await loader.mark_finished_uid(found[0])
        await loader.mark_consumed_uids([found[0]])
        keys.append(found[0])
    return keys


async def test_the_ledger_draws_each_epochs_uids_once_and_continues_after_a_checkpoint() -> None:
    prompts, plan = mixed((source("a", 8), 0.5), (source("b", 2), 2))
    keys = await drawn(_AsyncDataloader(prompts, seed=3, num_epochs=2, plan=plan), 16)
    assert len(set(keys)) == 16
    for epoch in (0, 1):
        assert sorted(uid for e, uid in keys if e == epoch) == sorted(plan.of_epoch(epoch))
    first = _AsyncDataloader(prompts, seed=3, num_epochs=2, plan=plan)
    begun = await drawn(first, 11)
    second = _AsyncDataloader(prompts, seed=3, num_epochs=2, plan=plan)
    await second.load_state_from_checkpoint(first.state_for_checkpoint())
    assert begun + await drawn(second, 5) == keys
    assert await second.get_next_non_consumed_data() is None


async def test_a_checkpoint_of_other_weights_is_refused() -> None:
    prompts, plan = mixed((source("a", 8), 0.5))
    saved = _AsyncDataloader(prompts, seed=3, plan=plan).state_for_checkpoint()
    for other in (mixed((source("a", 8), 0.25)), mixed((source("a", 8), 1))):
        with pytest.raises(CheckpointError, match="resume with the same task"):
            await _AsyncDataloader(other[0], seed=3, plan=other[1]).load_state_from_checkpoint(saved)


ROW = {"env_class": "relay", "start": 1, "addends": [2, 3]}


def files(directory: Path) -> tuple[str, str]:
    first = write_rows(directory / "a.jsonl", *({"uid": f"a{i}", "prompt": "x", **ROW} for i in range(4)))
    second = write_rows(directory / "b.jsonl", *({"uid": f"b{i}", "prompt": "x", **ROW} for i in range(6)))
    return str(first), str(second)


def prepared(directory: Path, weights: str, *more: str) -> tuple[Prompts, int]:
    first, second = files(directory)
    config = from_overrides(
        *("task=dataset", f"task.train_files=[{first},{second}]", f"task.train_weights={weights}"),
        *(f"policy.path={policy_directory(directory / 'policy')}", "trainer.policy_mini_batch_size=2"),
        *("trainer.num_steps=null", "trainer.num_epochs=3", *more),
    )
    prompts = prepare_prompts(config)
    return prompts, num_planned_steps(config, prompts)


@pytest.mark.parametrize(("weights", "num_steps"), [("[]", 15), ("[1,0.5]", 11), ("[2,1]", 21)])
def test_weights_of_the_command_line_set_how_many_steps_the_epochs_hold(
    tmp_path: Path, weights: str, num_steps: int
) -> None:
    assert prepared(tmp_path, weights)[1] == num_steps


def test_weights_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.train_weights must be empty or as long as task\.train_files \(2\)"):
        prepared(tmp_path, "[1]")
    with pytest.raises(ConfigError, match=r"task\.train_weights must be numbers > 0 .*got \[1.0, 0.0\]"):
        prepared(tmp_path, "[1,0]")


def test_a_row_whose_uid_is_that_of_another_ones_copy_is_refused(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "c.jsonl", *({"uid": uid, "prompt": "x", **ROW} for uid in ("q", "q~2")))
    with pytest.raises(DatasetError, match=r"the uid 'q~2' of a row is also that of a copy"):
        prepared(tmp_path, "[2]", f"task.train_files=[{rows}]")


def test_a_row_that_its_environment_does_not_take_is_named_by_file_and_line(tmp_path: Path) -> None:
    broken = write_rows(tmp_path / "c.jsonl", {"prompt": "x", **ROW}, {"prompt": "y", "env_class": "relay"})
    with pytest.raises(DatasetError, match=r"c\.jsonl line 2 cannot be used by env_class 'relay': .*needs the col"):
        prepared(tmp_path, "[]", f"task.eval_files=[{broken}]")
    endless = write_rows(tmp_path / "e.jsonl", {"prompt": "x", "max_turns": "many", **ROW})
    with pytest.raises(DatasetError, match=r"e\.jsonl line 1 .*: max_turns must be a whole number >= 1, got 'many'"):
        prepared(tmp_path, "[]", f"task.eval_files=[{endless}]")
    unknown = write_rows(tmp_path / "d.jsonl", {"prompt": "x", "env_class": "chess"})
    with pytest.raises(DatasetError, match=r"d\.jsonl line 1 cannot be used by env_class 'chess': .*one of .*gsm8k"):
        prepared(tmp_path, "[]", f"task.eval_files=[{unknown}]")


def test_a_prompt_that_the_policys_template_refuses_is_named_by_its_uid() -> None:
    twice = ({"role": "user", "content": "x"}, {"role": "user", "content": "y"})
    prompts = Prompts(train=(Prompt(uid="a", messages=twice, env_class="none"),), held_out=())
    with pytest.raises(DatasetError, match=r"prompt 'a' cannot be used with policy\.path: .*refuses these messages"):
        fitting_prompts(prompts, ChatRenderer(mistral()), 100, lambda _: None)
