"""Contract 1: in an epoch every uid is in exactly one state; nothing is trained twice, nothing disappears."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.data.ledger import UidLedger, UidState
from skyrl_async.errors import CheckpointError, StateError
from skyrl_async.types import Prompt

UIDS = ["a", "b", "c", "d", "e"]


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of events, with restarts from JSON at any point."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = UidLedger(UIDS, seed=1, num_epochs=3)
        self.running: list = []
        self.finished: list = []
        self.closed: list = []

    @rule()
    def draw(self) -> None:
        key = self.ledger.draw()
        if key is None:
            assert len(self.running) + len(self.finished) + len(self.closed) == 3 * len(UIDS)
        else:
            assert key not in self.running + self.finished + self.closed
            self.running.append(key)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), to=st.sampled_from([UidState.FINISHED, UidState.FAILED, UidState.NEW]))
    def end_generation(self, data: st.DataObject, to: UidState) -> None:
        key = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if to is UidState.NEW:
            self.ledger.requeue(key)
        else:
            self.ledger.mark(key, to)
            (self.finished if to is UidState.FINISHED else self.closed).append(key)

    @precondition(lambda self: self.finished)
    @rule(data=st.data(), to=st.sampled_from([UidState.TRAINED, UidState.FILTERED]))
    def close(self, data: st.DataObject, to: UidState) -> None:
        key = self.finished.pop(data.draw(st.integers(0, len(self.finished) - 1)))
        self.ledger.mark(key, to)
        self.closed.append(key)

    @rule()
    def restart(self) -> None:
        saved = json.loads(json.dumps(self.ledger.to_json()))
        self.ledger = UidLedger(UIDS, seed=1, num_epochs=3)
        self.ledger.load_json(saved)

    def states_of(self, epoch: int) -> list[UidState]:
        return [self.ledger.state((epoch, uid)) for uid in UIDS]

    @invariant()
    def every_uid_is_in_one_state(self) -> None:
        open_epochs = [int(epoch) for epoch in self.ledger.to_json()["epochs"]]
        for epoch in open_epochs:
            assert sum(len(self.ledger.uids(epoch, state)) for state in UidState) == len(UIDS)
        for key in self.running:
            assert self.ledger.state(key) is UidState.RUNNING
        for key in self.finished:
            assert self.ledger.state(key) is UidState.FINISHED
        counts = self.ledger.counts()
        held = Counter(s for e in open_epochs for s in UidState for _ in self.ledger.uids(e, s))
        assert {state: counts[state.value] for state in UidState} == {state: held[state] for state in UidState}
        for epoch in open_epochs:
            is_closed = [s in (UidState.TRAINED, UidState.FILTERED, UidState.FAILED) for s in self.states_of(epoch)]
            assert not all(is_closed), "a complete epoch is forgotten"
        assert counts["trained_total"] + counts["filtered_total"] + counts["failed_total"] == len(self.closed)


TestLedgerMachine = pytest.mark.slow(LedgerMachine.TestCase)
TestLedgerMachine.settings = settings(stateful_step_count=50)


@given(num_prompts=st.integers(1, 20), seed=st.integers(0, 5))
def test_epochs_are_reshuffled_permutations_of_all_uids(num_prompts: int, seed: int) -> None:
    uids = [str(i) for i in range(num_prompts)]
    ledger = UidLedger(uids, seed=seed, num_epochs=2)
    drawn = [ledger.draw() for _ in range(2 * num_prompts)]
    assert [epoch for epoch, _ in drawn] == [0] * num_prompts + [1] * num_prompts
    assert (
        sorted(uid for _, uid in drawn[:num_prompts]) == sorted(uids) == sorted(uid for _, uid in drawn[num_prompts:])
    )
    assert ledger.draw() is None


def test_two_epochs_have_different_orders() -> None:
    ledger = UidLedger([str(i) for i in range(50)], seed=0, num_epochs=2)
    first = [ledger.draw()[1] for _ in range(50)]
    second = [ledger.draw()[1] for _ in range(50)]
    assert first != second


def test_a_trained_uid_cannot_be_trained_again() -> None:
    ledger = UidLedger(UIDS, seed=0, num_epochs=1)
    key = ledger.draw()
    ledger.mark(key, UidState.FINISHED)
    ledger.mark(key, UidState.TRAINED)
    with pytest.raises(StateError, match="is trained and cannot become trained"):
        ledger.mark(key, UidState.TRAINED)


def prompts(uids: list[str]) -> list[Prompt]:
    return [Prompt(uid=uid, messages=({"role": "user", "content": uid},), env_class="x") for uid in uids]


async def test_a_requeued_prompt_is_drawn_next() -> None:
    loader = _AsyncDataloader(prompts(UIDS), seed=0, num_epochs=1)
    key, prompt = await loader.get_next_non_consumed_data()
    await loader.requeue(key)
    again, same = await loader.get_next_non_consumed_data()
    assert (again, same) == (key, prompt)


async def test_the_prompts_that_fill_no_mini_batch_lead_the_next_epoch() -> None:
    loader = _AsyncDataloader(prompts(UIDS), seed=0, num_epochs=2)
    drawn = [await loader.get_next_non_consumed_data() for _ in range(6)]
    mini_batches = [[key for key, _ in drawn[i : i + 2]] for i in range(0, 6, 2)]
    assert [epoch for epoch, _ in mini_batches[2]] == [0, 1]


async def test_a_checkpoint_of_another_dataset_is_refused() -> None:
    saved = _AsyncDataloader(prompts(UIDS), seed=0).state_for_checkpoint()
    other = _AsyncDataloader(prompts(["x", "y"]), seed=0)
    with pytest.raises(CheckpointError, match="made with 5 other prompts"):
        await other.load_state_from_checkpoint(saved)


CONTENTS = {
    "messages": ({"role": "user", "content": "another question"},),
    "env_class": "y",
    "extras": {"reward_spec": {"ground_truth": "8"}},
}


@pytest.mark.parametrize("field", CONTENTS)
async def test_a_checkpoint_of_the_same_uids_with_another_content_is_refused(field: str) -> None:
    saved = _AsyncDataloader(prompts(UIDS), seed=0).state_for_checkpoint()
    first, *others = prompts(UIDS)
    changed = _AsyncDataloader([replace(first, **{field: CONTENTS[field]}), *others], seed=0)
    with pytest.raises(CheckpointError, match="same uids and other contents"):
        await changed.load_state_from_checkpoint(saved)


async def test_rows_are_the_same_in_another_process_whatever_objects_they_hold() -> None:
    def rows(*numbers: int) -> list[Prompt]:
        extras = {"object": object(), "date": date(2020, 1, 1), 3: "key", "nested": {("a", 1): 2}}
        extras |= {"function": lambda: 0, "set": set(numbers)}
        return [replace(prompt, extras=extras) for prompt in prompts(UIDS)]

    held, others = rows(0, 8), rows(8, 0)  # each has its own order
    saved = _AsyncDataloader(held, seed=0).state_for_checkpoint()
    await _AsyncDataloader(others, seed=0).load_state_from_checkpoint(saved)


async def test_a_checkpoint_of_another_seed_is_refused() -> None:
    saved = _AsyncDataloader(prompts(UIDS), seed=0).state_for_checkpoint()
    with pytest.raises(CheckpointError, match="trainer.seed=0, this run has 1"):
        await _AsyncDataloader(prompts(UIDS), seed=1).load_state_from_checkpoint(saved)


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: saved.pop("ledger"),
        lambda saved: saved.pop("content_digest"),
        lambda saved: saved.update(ledger=[]),
        lambda saved: saved["ledger"].update(epochs={"first": {}}),
        lambda saved: saved["ledger"]["totals"].update(skipped=1),
        lambda saved: saved.update(dataset_digest="another") or saved.pop("num_prompts"),
    ],
    ids=[
        "missing",
        "without a digest of contents",
        "of another type",
        "an epoch without a number",
        "an unknown state",
        "a missing count",
    ],
)
async def test_a_dataloader_s_state_of_another_version_is_refused_by_its_file_and_field(
    damage: Callable[[dict[str, Any]], object],
) -> None:
    saved = _AsyncDataloader(prompts(UIDS), seed=0).state_for_checkpoint()
    damage(saved)
    with pytest.raises(
        CheckpointError, match=r"trainer_state.json, dataloader holds no ledger .*; resume from another"
    ):
        await _AsyncDataloader(prompts(UIDS), seed=0).load_state_from_checkpoint(saved)


async def test_consumed_uids_are_listed_and_epochs_end_as_skyrl_does() -> None:
    loader = _AsyncDataloader(prompts(UIDS), seed=0)
    drawn = [(await loader.get_next_non_consumed_data())[0] for _ in range(2 * len(UIDS) + 1)]
    first = drawn[: len(UIDS)]
    for key in first:
        await loader.mark_finished_uid(key)
    await loader.mark_consumed_uids(first[:1])
    assert loader.get_consumed_uids_list(0) == [first[0][1]] and loader.get_consumed_uids_list() == []
    with pytest.raises(StateError, match=r"epochs \[0\] still have prompts"):
        await loader.reset_at_epoch_end()
    await loader.mark_consumed_uids(first[1:])
    await loader.reset_at_epoch_end()
