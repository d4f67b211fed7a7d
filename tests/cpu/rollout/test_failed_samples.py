"""Samples that fail or hang alone: kept samples, retries, and groups that stay incomplete. Nearly all in virtual time."""

import asyncio
import random
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.config.schema.generator import GeneratorConfig, OnFailedSamples
from skyrl_async.errors import DeadlineError, GenerationError, NoEngineError
from skyrl_async.generators.agent.reward import AgentEpisode, FunctionReward
from skyrl_async.generators.gym.environment import CallThreads
from skyrl_async.generators.gym.generator import GymGenerator, derive_seed
from skyrl_async.rollout.failed_samples import RolloutResult
from skyrl_async.rollout.generator import Generator, GroupRequest, keeps_samples, run_samples
from skyrl_async.rollout.retrier import RolloutRetrier
from skyrl_async.runtime.daemon_threads import DaemonThreads
from skyrl_async.runtime.outages import Backoff
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Completion, Prompt, SamplingParams, Trajectory
from tests.cpu.generators.test_gym_generator import Quiz, ScriptedSampler
from tests.cpu.tiny_chat import RENDERER
from tests.patience import PATIENCE_S

FILL, TRAIN_REST, DROP = OnFailedSamples.fill, OnFailedSamples.train_rest, OnFailedSamples.drop
TIMEOUT_S = 100.0


def row(
    reward: float = 1.0, *, is_abandoned: bool = False, num_tokens: int = 2, index: int | None = None
) -> Trajectory:
    return Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(2,) * num_tokens,
        loss_mask=(0 if is_abandoned else 1,) * num_tokens,
        logprobs=(-0.5,) * num_tokens,
        versions=(0,) * num_tokens,
        reward=reward,
        is_abandoned=is_abandoned,
        sample_index=index,
    )


def request(num_samples: int = 4, *, is_evaluation: bool = False) -> GroupRequest:
    return GroupRequest(
        prompt=Prompt(uid="p", messages=({"role": "user", "content": "hello"},), env_class="quiz"),
        num_samples=num_samples,
        sampling=SamplingParams(max_tokens=50),
        seed=11,
        is_evaluation=is_evaluation,
    )


OK, FAIL, HANG, EXIT, EMPTY, ABANDON = "ok", "fail", "hang", "exit", "empty", "abandon"


@dataclass
class Scripted:
    """Plays sample i for the nth time as ``script[i][n]`` says; after the script's end it succeeds."""

    script: dict[int, list[str]]
    plays: list[int] = field(default_factory=list)
    asked: list[tuple[int, ...]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @keeps_samples
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        self.asked.append(request.indices)
        self.times.append(asyncio.get_running_loop().time())
        return await run_samples(request, "sample", self._play, lambda row: (row,), lambda rows: rows[0])

    async def _play(self, index: int) -> Trajectory:
        outcome = [*self.script.get(index, []), *[OK] * 99][self.plays.count(index)]
        self.plays.append(index)
        await asyncio.sleep(1 + index)
        if outcome == HANG:
            await asyncio.Event().wait()
        if outcome == FAIL:
            raise ValueError(f"sample {index} broke")
        if outcome == EXIT:
            sys.exit(3)
        if outcome == EMPTY:
            return replace(row(), loss_mask=(False, False))
        return row(reward=float(index), is_abandoned=outcome == ABANDON)


class Unaware(Scripted):
    """The same, but only whole groups count: its rewards are not what was kept."""

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        return tuple(replace(row, reward=row.reward + 10) for row in await super().generate(request))


def run(
    generator: Generator,
    policy: OnFailedSamples = FILL,
    *,
    group: GroupRequest | None = None,
    max_retries: int = 2,
    backoff: Backoff | None = None,
) -> RolloutResult:
    retrier = RolloutRetrier(
        generator,
        GeneratorConfig(
            max_retries=max_retries,
            rollout_timeout_s=TIMEOUT_S,
            on_failed_samples=policy,
            retry_backoff_s=backoff.base_s if backoff else 0,
            max_retry_backoff_s=backoff.max_s if backoff else 0,
        ),
    )
    return run_in_virtual_time(retrier.run_rollout(group or request()))


def rewards(rollout: RolloutResult) -> list[float]:
    return [row.reward for row in rollout.trajectories]


def test_only_failed_samples_are_generated_again() -> None:
    generator = Scripted({1: [FAIL, FAIL], 2: [FAIL]})
    rollout = run(generator)
    assert (rewards(rollout), rollout.num_failed) == ([0, 1, 2, 3], 0)
    assert generator.asked == [(0, 1, 2, 3), (1, 2), (1,)]
    assert [row.sample_index for row in rollout.trajectories] == [0, 1, 2, 3]


def test_a_sample_that_calls_sys_exit_loses_only_itself() -> None:
    generator = Scripted({1: [EXIT]})
    assert rewards(run(generator)) == [0, 1, 2, 3] and generator.asked == [(0, 1, 2, 3), (1,)]
    with pytest.raises(GenerationError, match=r"sample 1 of p called sys.exit\(3\)"):
        run(Scripted({1: [EXIT] * 9}))


@pytest.mark.parametrize("first", [FAIL, EMPTY], ids=["in two tries", "in one try"])
def test_a_group_in_which_nothing_was_sampled_fails(first: str) -> None:
    script = {index: [EMPTY] * 9 for index in range(4)} | {1: [first] + [EMPTY] * 9}
    with pytest.raises(GenerationError, match="no sampled token for p: every loss mask is empty"):
        run(Scripted(script), TRAIN_REST)


@pytest.mark.parametrize(("policy", "asked"), [(FILL, [(0, 1, 2, 3), (0, 1)]), (TRAIN_REST, [(0, 1, 2, 3), (1,)])])
def test_a_sample_that_is_abandoned_beside_one_that_fails_is_tried_again_where_groups_are_filled(
    policy: OnFailedSamples, asked: list[tuple[int, ...]]
) -> None:
    generator = Scripted({0: [ABANDON], 1: [FAIL]})
    run(generator, policy)
    assert generator.asked == asked


def test_a_sample_that_hangs_loses_only_itself_to_the_deadline() -> None:
    generator = Scripted({2: [HANG]})
    rollout = run(generator)
    assert rewards(rollout) == [0, 1, 2, 3] and generator.asked == [(0, 1, 2, 3), (2,)]
    assert generator.times == [0, TIMEOUT_S]


def test_fill_fails_a_group_that_stays_incomplete_with_the_name_and_the_phase_of_what_hung() -> None:
    always = Scripted({1: [HANG] * 9})
    with pytest.raises(DeadlineError, match=r"the rollout of p took longer .*=100: sample 1 generating for 100 s$"):
        run(always)
    assert Counter(always.plays) == {0: 1, 1: 3, 2: 1, 3: 1}


def test_train_rest_goes_on_with_the_others_after_the_last_try() -> None:
    generator = Scripted({1: [FAIL] * 9, 3: [HANG] * 9})
    rollout = run(generator, TRAIN_REST)
    assert (rewards(rollout), rollout.num_failed) == ([0, 2], 2)
    assert [row.sample_index for row in rollout.trajectories] == [0, 2]
    assert isinstance(rollout.failure, DeadlineError)
    assert Counter(generator.plays) == {0: 1, 1: 3, 2: 1, 3: 3}


def test_train_rest_needs_two_samples_because_one_alone_has_no_advantage() -> None:
    with pytest.raises(ValueError, match="sample 0 broke"):
        run(Scripted({i: [FAIL] * 9 for i in range(3)}), TRAIN_REST)


def test_drop_fails_the_group_at_its_first_loss() -> None:
    generator = Scripted({3: [FAIL]})
    with pytest.raises(ValueError, match="sample 3 broke"):
        run(generator, DROP)
    assert generator.asked == [(0, 1, 2, 3)]


def test_finished_samples_of_a_failed_group_are_counted_as_wasted() -> None:
    retrier = RolloutRetrier(
        Scripted({0: [FAIL] * 9}),
        GeneratorConfig(max_retries=1, rollout_timeout_s=TIMEOUT_S, retry_backoff_s=0, on_failed_samples=FILL),
    )
    with pytest.raises(ValueError, match="sample 0 broke"):
        run_in_virtual_time(retrier.run_rollout(request()))
    assert (retrier.num_wasted_tokens, retrier.num_retries) == (6, 1)


def test_an_evaluation_is_complete_or_fails() -> None:
    with pytest.raises(ValueError, match="sample 1 broke"):
        run(Scripted({1: [FAIL] * 9}), TRAIN_REST, group=request(is_evaluation=True))
    assert rewards(run(Scripted({1: [FAIL]}), TRAIN_REST, group=request(is_evaluation=True))) == [0, 1, 2, 3]


def test_a_generator_that_changes_what_another_one_returns_is_asked_for_whole_groups() -> None:
    generator = Unaware({1: [FAIL], 2: [OK, HANG]})
    assert rewards(run(generator)) == [10, 11, 12, 13]
    assert generator.asked == [(0, 1, 2, 3)] * 3


def test_a_try_that_returns_other_samples_than_it_was_asked_for_fails() -> None:
    class Forgetful(Scripted):
        @keeps_samples
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            await super().generate(request)
            return tuple(row(index=index) for index in range(request.num_samples))

    with pytest.raises(GenerationError, match=r"sample_index 0 for p, expected all of them of \(1,\)"):
        run(Forgetful({1: [FAIL]}), max_retries=1)


def test_a_kept_sample_without_a_finite_reward_is_generated_again() -> None:
    class Diverging(Scripted):
        async def _play(self, index: int) -> Trajectory:
            is_first = index not in self.plays
            rollout = await super()._play(index)
            return replace(rollout, reward=float("nan")) if index == 2 and is_first else rollout

    generator = Diverging({1: [FAIL]})
    assert rewards(run(generator)) == [0, 1, 2, 3]
    assert generator.asked == [(0, 1, 2, 3), (1, 2)]


def test_a_returned_sample_without_a_finite_reward_is_named_with_the_reward() -> None:
    class Diverging(Scripted):
        async def _play(self, index: int) -> Trajectory:
            return replace(await super()._play(index), reward=float("inf") if index == 2 else 0.0)

    with pytest.raises(GenerationError, match="the reward inf for sample 2 of p, expected a finite number"):
        run(Diverging({}), max_retries=0)


@dataclass
class Abandoning:
    """An agent's: returns its failed samples as abandoned rows, or without any."""

    num_times: int
    asked: list[tuple[int, ...]] = field(default_factory=list)

    @keeps_samples
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        self.asked.append(request.indices)
        is_failing = len(self.asked) <= self.num_times
        return tuple(
            row(index=i, is_abandoned=is_failing and i == 1)
            for i in request.indices
            if not (is_failing and i == 2)  # nothing was sampled
        )


def test_abandoned_samples_stay_abandoned_under_train_rest_and_are_generated_again_under_fill() -> None:
    resting, filling = Abandoning(1), Abandoning(1)
    assert [t.is_abandoned for t in run(resting, TRAIN_REST).trajectories] == [False, True, False]
    assert [t.is_abandoned for t in run(filling, FILL).trajectories] == [False] * 4
    assert (resting.asked, filling.asked) == ([(0, 1, 2, 3)], [(0, 1, 2, 3), (1, 2)])
    with pytest.raises(GenerationError, match="samples 1, 2 of p were abandoned"):
        run(Abandoning(9), DROP)


def test_samples_kept_by_a_try_that_broke_the_contract_are_not_used_later() -> None:
    class Breaking(Scripted):
        @keeps_samples
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            if len(self.asked) == 1:
                self.asked.append(request.indices)
                raise ValueError("nothing was sampled")
            rows = await super().generate(request)
            return rows if len(self.asked) > 1 else rows[1:]

    generator = Breaking({})
    assert rewards(run(generator)) == [0, 1, 2, 3]
    assert generator.asked == [(0, 1, 2, 3)] * 3


def test_no_engine_is_no_failed_rollout_and_waits_for_no_other_sample() -> None:
    class Deserted(Scripted):
        async def _play(self, index: int) -> Trajectory:
            if index == 1:
                raise NoEngineError("no engine is left")
            return await super()._play(index)

    async def timed() -> float:
        with pytest.raises(NoEngineError):
            await RolloutRetrier(
                generator, GeneratorConfig(max_retries=2, rollout_timeout_s=TIMEOUT_S, retry_backoff_s=0)
            ).run_rollout(request())
        return asyncio.get_running_loop().time()

    generator = Deserted({})
    assert run_in_virtual_time(timed()) == 0
    assert generator.asked == [(0, 1, 2, 3)]


def test_waits_before_retries_double_up_to_their_limit_and_are_jittered_by_the_seed() -> None:
    backoff = Backoff(base_s=4, max_s=20)
    for number, longest in enumerate([4, 8, 16, 20, 20]):
        delays = {backoff.seconds(number, seed) for seed in range(50)}
        assert len(delays) == 50 and longest / 2 <= min(delays) < max(delays) <= longest
        assert backoff.seconds(number, 7) == backoff.seconds(number, 7)
    assert Backoff(base_s=1, max_s=1e9).seconds(5000, 0) <= 1e9

    generator = Scripted({0: [FAIL] * 3})
    run(generator, max_retries=3, backoff=backoff)
    slowest = [4, 1, 1]
    waits = [b - a - s for a, b, s in zip(generator.times, generator.times[1:], slowest, strict=False)]
    assert waits == pytest.approx([backoff.seconds(number, 11) for number in range(3)])


outcomes = st.lists(st.sampled_from([OK, FAIL, HANG]), max_size=4)


@given(
    script=st.dictionaries(st.integers(0, 4), outcomes, max_size=5),
    num_samples=st.integers(1, 5),
    max_retries=st.integers(0, 3),
    policy=st.sampled_from(OnFailedSamples),
)
def test_a_group_comes_out_once_in_bounded_time_and_no_finished_sample_is_generated_again(
    script: dict[int, list[str]], num_samples: int, max_retries: int, policy: OnFailedSamples
) -> None:
    generator = Scripted(script)
    num_tries = 1 if policy is DROP else max_retries + 1
    ends = {i: [*script.get(i, []), *[OK] * 9] for i in range(num_samples)}
    finished = [i for i in range(num_samples) if OK in ends[i][:num_tries]]
    may_be_trained = len(finished) == num_samples or (policy is TRAIN_REST and len(finished) >= min(2, num_samples))
    backoff = Backoff(base_s=1, max_s=8)

    async def timed() -> tuple[RolloutResult | Exception, float]:
        retrier = RolloutRetrier(
            generator,
            GeneratorConfig(
                max_retries=max_retries,
                rollout_timeout_s=TIMEOUT_S,
                on_failed_samples=policy,
                retry_backoff_s=backoff.base_s,
                max_retry_backoff_s=backoff.max_s,
            ),
        )
        try:
            outcome: RolloutResult | Exception = await retrier.run_rollout(request(num_samples))
        except (ValueError, DeadlineError) as error:
            outcome = error
        assert retrier.statuses() == [] and len(asyncio.all_tasks()) == 1
        return outcome, asyncio.get_running_loop().time()

    outcome, seconds = run_in_virtual_time(timed())
    assert isinstance(outcome, RolloutResult) == may_be_trained
    assert seconds <= num_tries * TIMEOUT_S + (num_tries - 1) * 8
    for i in range(num_samples):
        assert generator.plays.count(i) == min(num_tries, ends[i].index(OK) + 1)
    if isinstance(outcome, RolloutResult):
        assert rewards(outcome) == finished and outcome.num_failed == num_samples - len(finished)


class Answers(ScriptedSampler):
    """Says one line per turn; ``trouble`` happens first, told the session's sample and how often it was asked for."""

    def __init__(self, trouble: Callable[[int, int], Coroutine[Any, Any, None]]) -> None:
        super().__init__(["a", "b", "c"])
        self._trouble = trouble
        self._asked: Counter[int] = Counter()

    async def generate_tokens(self, *args: Any, session_id: str | None = None, **kwargs: Any) -> Completion:
        sample = int(str(session_id).rpartition("/")[2])
        self._asked[sample] += 1
        await asyncio.sleep(1)
        await self._trouble(sample, self._asked[sample])
        return await super().generate_tokens(*args, session_id=session_id, **kwargs)


def test_episodes_that_finished_are_kept_and_the_others_start_again_with_their_own_seeds() -> None:
    async def trouble(sample: int, time: int) -> None:
        if sample == 1 and time == 1:
            raise ConnectionError("reset")
        if sample == 2 and time == 1:
            await asyncio.Event().wait()

    sampler = Answers(trouble)
    made: list[Quiz] = []

    def make(name: str, extras: dict[str, Any]) -> Quiz:
        made.append(Quiz())
        return made[-1]

    rollout = run(GymGenerator(sampler, RENDERER, make))
    assert [row.num_turns for row in rollout.trajectories] == [2, 2, 2, 2]
    assert len(made) == 6 and all(environment.closed.is_set() for environment in made)
    seeds = Counter(sampling.seed for _, _, sampling in sampler.requests)
    assert seeds == {derive_seed(11, sample, turn): 1 for sample in range(4) for turn in range(2)}


def test_an_environment_that_breaks_costs_its_own_sample() -> None:
    class Breaking(Quiz):
        def step(self, action: str) -> dict[str, Any]:
            raise ZeroDivisionError("the tool broke")

    async def fine(sample: int, time: int) -> None:
        pass

    made: list[Quiz] = []

    def make(name: str, extras: dict[str, Any]) -> Quiz:
        made.append(Breaking() if len(made) == 1 else Quiz())
        return made[-1]

    sampler = Answers(fine)
    assert run(GymGenerator(sampler, RENDERER, make), max_retries=1).num_failed == 0
    assert len(made) == 5 and all(environment.closed.is_set() for environment in made)
    assert Counter(str(session)[-1] for session, _, _ in sampler.requests) == {"0": 2, "1": 3, "2": 2, "3": 2}


class HangsFor(ModelledGenerator):
    """Never returns for one prompt."""

    @keeps_samples
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        if request.prompt.uid == "p3":
            await asyncio.Event().wait()
        return await super().generate(request)


RUN = SimulationSettings(
    mean_tokens=100.0, num_steps=None, num_epochs=1, num_prompts=32, rollout_timeout_s=500.0, step_seconds=1.0
)


def simulate(settings: SimulationSettings, generator_over: Any) -> Any:
    async def main() -> Any:
        simulation = Simulation(settings, generator_over=generator_over)
        await simulation.trainer.run()
        return simulation

    return run_in_virtual_time(main())


def test_contract_8_a_generator_that_never_returns_for_one_prompt_does_not_stop_training() -> None:
    settings = replace(RUN, max_retries=1, retry_backoff_s=5, max_retry_backoff_s=5)
    simulation = simulate(settings, HangsFor)
    assert simulation.dataloader.statistics()["trained_total"] == 31
    assert simulation.dataloader.statistics()["failed_total"] == 1
    assert simulation.workers.counts["retries"] == 1


class LosesSamples(ModelledGenerator):
    """Some samples of some prompts always fail."""

    async def _one(self, request: GroupRequest, index: int, seed: int) -> Trajectory:
        if (int(request.prompt.uid[1:]) + index) % 9 == 0:
            raise RuntimeError("this sample never works")
        return await super()._one(request, index, seed)


def test_groups_with_fewer_members_are_trained_and_counted_each_prompt_once() -> None:
    settings = replace(RUN, group_size=4, max_retries=1, max_failed_fraction=0.2)
    simulation = simulate(settings, LosesSamples)
    groups = [group for step in simulation.policy.steps for group in step]
    lost = [index for number in range(32) for index in range(4) if (number + index) % 9 == 0]
    assert len(groups) == 32 and sum(map(len, groups)) == 32 * 4 - len(lost)
    assert {len(group) for group in groups} == {3, 4}
    counts, totals = simulation.workers.counts, simulation.trainer.totals
    assert counts["failed_samples"] == totals.failed_samples == len(lost) and counts["failed_groups"] == 0
    last = [values for _, values in simulation.logged if "generate/failed_samples" in values][-1]
    assert last["generate/failed_samples"] == len(lost) and last["generate/retries"] == len(lost)


class AsksForTitles(ModelledGenerator):
    """An agent that asks for a title of 14 tokens beside every sample; every second one fails of a cut answer."""

    async def _one(self, request: GroupRequest, index: int, seed: int) -> Trajectory:
        row = await super()._one(request, index, seed)
        return replace(row, metrics={"agent/side_tokens": 14.0, "agent/cut_short": float(index % 2)})


@pytest.mark.slow
def test_tokens_of_side_requests_and_agents_cut_short_are_in_the_summary() -> None:
    plain, titled = (
        simulate(replace(RUN, group_size=4), generator) for generator in (ModelledGenerator, AsksForTitles)
    )
    before, after = (simulation.trainer.totals.summary() for simulation in (plain, titled))
    assert after["side_tokens"] == 14 * 4 * 32 and after["cut_short_samples"] == 2 * 32
    assert after["tokens_generated"] == before["tokens_generated"] + after["side_tokens"]
    assert after["tokens_trained"] == before["tokens_trained"] and after["length_ratio"] == before["length_ratio"]


def test_contract_8_lost_samples_count_by_their_share_towards_the_limit_of_failures() -> None:
    with pytest.raises(
        GenerationError, match=r"more than generator.max_failed_fraction=0.05; .* this sample never works"
    ):
        simulate(replace(RUN, group_size=4, max_failed_fraction=0.05), LosesSamples)


def test_the_same_losses_fail_whole_groups_where_they_have_to_be_full() -> None:
    settings = replace(RUN, group_size=4, max_failed_fraction=1.0, on_failed_samples=FILL, max_retries=1)
    simulation = simulate(settings, LosesSamples)
    lost = {number for number in range(32) for index in range(4) if (number + index) % 9 == 0}
    assert simulation.workers.counts["failed_groups"] == len(lost)
    assert simulation.trainer.totals.wasted_tokens > 0


class Unreliable(ModelledGenerator):
    """Every play of a sample fails, hangs or ends as its dice say."""

    def __init__(self, sampler: Any, seed: int, share: float) -> None:
        super().__init__(sampler)
        self.seed, self.share = seed, share
        self.plays: Counter[tuple[str, int]] = Counter()
        self.seeds: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.ended: Counter[tuple[str, int]] = Counter()

    async def _one(self, request: GroupRequest, index: int, seed: int) -> Trajectory:
        key = request.prompt.uid, index
        self.plays[key] += 1
        self.seeds[key].add(seed)
        dice = random.Random(f"{self.seed}-{key}-{self.plays[key]}").random()
        if dice < self.share / 2:
            await asyncio.Event().wait()
        if dice < self.share:
            raise RuntimeError("bad luck")
        rollout = await super()._one(request, index, seed)
        self.ended[key] += 1
        return rollout


@pytest.mark.slow
@given(
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.05, 0.2, 0.5]),
    policy=st.sampled_from(OnFailedSamples),
    bound=st.integers(0, 2),
    max_retries=st.integers(0, 2),
)
def test_contract_8_whatever_fails_every_prompt_is_trained_or_failed_once(
    seed: int, share: float, policy: OnFailedSamples, bound: int, max_retries: int
) -> None:
    run = replace(
        RUN,
        num_prompts=24,
        mini_batch_size=4,
        group_size=3,
        max_staleness_steps=bound,
        on_failed_samples=policy,
        max_retries=max_retries,
        max_failed_fraction=1.0,
        retry_backoff_s=2,
        max_retry_backoff_s=9,
    )
    made: list[Unreliable] = []

    def make(client: Any) -> Unreliable:
        made.append(Unreliable(client, seed, share))
        return made[-1]

    try:
        simulation = simulate(run, make)
    except GenerationError as error:
        if "24 of the last 24 groups failed" not in str(error):
            raise
        return
    (generator,) = made
    groups = [group for step in simulation.policy.steps for group in step]
    trained = Counter(tuple(group[0].prompt_token_ids.tolist()) for group in groups)
    totals, counts = simulation.trainer.totals, simulation.workers.counts
    assert set(trained.values()) == {1} and len(groups) + counts["failed_groups"] == 24
    assert simulation.dataloader.statistics()["trained_total"] == len(groups)
    assert simulation.dataloader.statistics()["failed_total"] == totals.failed_groups
    assert totals.groups_over_bound == 0
    assert totals.failed_samples == sum(3 - len(group) for group in groups)
    assert min(map(len, groups)) >= (2 if policy is TRAIN_REST else 3)
    assert set(generator.ended.values()) == {1} and {len(seeds) for seeds in generator.seeds.values()} == {1}
    assert max(generator.plays.values()) <= (1 if policy is DROP else max_retries + 1)
    num_ended = sum(generator.ended.values()) - sum(map(len, groups))
    assert (totals.wasted_tokens > 0) >= (num_ended > 0)


@pytest.mark.slow
async def test_environment_calls_that_never_return_do_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One place: the first environment's tool hangs for ever, and again and again."""
    released = threading.Event()

    class Hanging(Quiz):
        is_fast = False

        def step(self, action: str) -> dict[str, Any]:
            assert released.wait(PATIENCE_S)
            return super().step(action)

    class Blocking(Quiz):
        is_fast = False

    made: list[Quiz] = []

    def make(name: str, extras: dict[str, Any]) -> Quiz:
        made.append(Hanging() if len(made) < 3 else Blocking())
        return made[-1]

    monkeypatch.setattr("skyrl_async.generators.gym.generator.CallThreads", lambda name: CallThreads(name, 1))
    generator = GymGenerator(ScriptedSampler(["a"] * 9), RENDERER, make)
    retrier = RolloutRetrier(generator, GeneratorConfig(max_retries=20, rollout_timeout_s=0.3, retry_backoff_s=0))
    try:
        (row,) = await retrier.generate(request(1))
        assert row.reward == pytest.approx(0.2) and retrier.num_retries >= 3
    finally:
        released.set()


async def test_a_reward_function_that_never_returns_does_not_block_others() -> None:
    released = threading.Event()

    def reward(prompt: Prompt, episode: AgentEpisode) -> float:
        assert prompt.uid != "hangs" or released.wait(PATIENCE_S)
        return 1.0

    judge = FunctionReward(reward, CallThreads("reward", 1))
    episode = AgentEpisode(messages=(), last_text=None, output="", working_dir=Path(), num_turns=1, is_truncated=False)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await judge.reward_of(replace(request().prompt, uid="hangs"), episode)
        assert (await judge.reward_of(request().prompt, episode)).reward == 1.0
    finally:
        released.set()


def test_a_call_that_never_returns_does_not_keep_the_process_from_ending() -> None:
    code = (
        "import threading; from skyrl_async.runtime.daemon_threads import DaemonThreads; "
        "threads = DaemonThreads('t'); threads.submit(threading.Event().wait); print(threads.submit(len, 'abc').result())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ended.stdout == "3\n"


def test_threads_are_reused_and_failures_are_raised() -> None:
    threads = DaemonThreads("environment")
    idents = {threads.submit(threading.get_ident).result() for _ in range(20)}
    assert len(idents) < 20  # a thread is free just after its result is there
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result()
