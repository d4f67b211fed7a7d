"""Samples that fail in groups of a checkpoint: what finished stays, on a retry as on a resume; what failed is played again."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.config.schema.generator import GeneratorConfig, OnFailedSamples
from skyrl_async.errors import GenerationError
from skyrl_async.generators.agent.generator import AgentGenerator
from skyrl_async.rollout.failed_samples import RolloutResult
from skyrl_async.rollout.generator import GroupRequest, keeps_samples, run_samples
from skyrl_async.rollout.group_state import ResumeCounts, SampleState, SampleStates
from skyrl_async.rollout.retrier import RolloutRetrier
from skyrl_async.rollout.sampler import TokenUsage, recording_tokens_to
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.types import Trajectory
from tests.cpu.rollout.test_failed_samples import request, row

NUM_SAMPLES = 4
HALF = SampleState(state={"kind": "half"}, num_tokens=1)


def finished(index: int) -> SampleState:
    return SampleState(rows=(row(reward=float(index)),), num_tokens=2)


class Halves:
    """Each sample takes two seconds, or one from where a checkpoint has it; some fail at their ends, the first time(s)."""

    def __init__(self, num_failures: Mapping[int, int]) -> None:
        self.failures_left = dict(num_failures)
        self.begun: list[int] = []
        self.gone_on: list[int] = []

    @keeps_samples
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        return await run_samples(
            request, "half", lambda index: self._play(request, index), lambda row: (row,), lambda rows: rows[0]
        )

    async def _play(self, request: GroupRequest, index: int) -> Trajectory:
        is_half = request.sample_states.restore(index) is not None
        (self.gone_on if is_half else self.begun).append(index)
        now = HALF if is_half else None
        request.sample_states.track(index, lambda: now)
        if not is_half:
            await asyncio.sleep(1.0)
            now = HALF
        await asyncio.sleep(1.0)
        if self.failures_left.get(index):
            self.failures_left[index] -= 1
            raise GenerationError("not so")
        return row(reward=float(index))


def play(generator: Halves, saved: SampleStates, looks: list[dict[int, SampleState]]) -> RolloutResult:
    """Play the group, and take a look at where it stands every half second."""

    async def main() -> RolloutResult:
        retrier = RolloutRetrier(
            generator,
            GeneratorConfig(
                max_retries=2, rollout_timeout_s=100.0, retry_backoff_s=0, on_failed_samples=OnFailedSamples.fill
            ),
        )
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(retrier.run_rollout(replace(request(NUM_SAMPLES), sample_states=saved)))
            await asyncio.sleep(0.25)
            while not playing.done():
                looks.append(saved.snapshot())
                await asyncio.sleep(0.5)
        return playing.result()

    return run_in_virtual_time(main())


@given(
    kept=st.dictionaries(st.integers(0, NUM_SAMPLES - 1), st.booleans()),
    num_failures=st.dictionaries(st.integers(0, NUM_SAMPLES - 1), st.integers(0, 2)),
)
def test_contract_7_a_resumed_group_plays_what_failed_again_and_what_finished_never(
    kept: dict[int, bool], num_failures: dict[int, int]
) -> None:
    """``kept`` says of a sample whether it was finished in the checkpoint, or half."""
    counts = ResumeCounts()
    states = {i: finished(i) if is_finished else HALF for i, is_finished in kept.items()}
    generator, looks = Halves(num_failures), []
    group = play(generator, SampleStates(states, num_samples=NUM_SAMPLES, counts=counts), looks)
    assert [t.reward for t in group.trajectories] == [0.0, 1.0, 2.0, 3.0] and group.num_failed == 0
    done = {i for i, is_finished in kept.items() if is_finished}
    for index in range(NUM_SAMPLES):
        num_plays = 0 if index in done else 1 + num_failures.get(index, 0)
        assert generator.gone_on.count(index) == (index in kept and index not in done)
        assert generator.begun.count(index) + generator.gone_on.count(index) == num_plays
    assert counts == ResumeCounts(
        resumed_trajectories=len(kept), restarted_trajectories=NUM_SAMPLES - len(kept), lost_tokens=0
    )
    for look, later in itertools.pairwise(looks):
        rows = {index: sample.rows for index, sample in look.items() if sample.rows is not None}
        assert rows.items() <= {index: sample.rows for index, sample in later.items()}.items(), "finished stays so"


def test_a_failed_sample_has_no_state_while_it_waits_for_its_retry() -> None:
    """A run resumed from there would begin where the failure is certain to come again."""
    saved, looks = SampleStates(), []
    play(Halves({1: 1}), saved, looks)
    at = dict(zip((0.25 + i / 2 for i in range(len(looks))), looks, strict=True))
    assert 1 not in at[0.75] and at[1.25][1] is HALF
    assert 1 not in at[2.25], "its second try has just begun"
    assert all(at[2.25][index].rows for index in (0, 2, 3))


def test_tokens_of_restored_finished_samples_count_for_their_group_again() -> None:
    """They are thrown away with it, should it be drawn again."""
    account = TokenUsage()
    with recording_tokens_to(account):
        play(Halves({}), SampleStates({0: finished(0), 3: finished(3)}, num_samples=NUM_SAMPLES), [])
    assert account.num_tokens == 4


def test_agents_that_were_finished_in_the_checkpoint_do_not_run_again() -> None:
    """Nor is a session opened for them: the pool that is given here has none."""
    rows = {0: (row(reward=1.0, index=0), row(reward=1.0, index=0)), 1: (row(reward=0.0, index=1),)}
    states = {i: SampleState(rows=of_one, num_tokens=2) for i, of_one in rows.items()}

    async def main() -> tuple[Trajectory, ...]:
        generator = AgentGenerator(None, None, None, agent_timeout_s=1.0)
        return await generator.generate(replace(request(2), sample_states=SampleStates(states, num_samples=2)))

    assert run_in_virtual_time(main()) == (*rows[0], *rows[1])
