"""The staleness policies: which tokens and groups are trained, what is thrown away, and what the bound is said to cost."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.composition.parts import placement
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.trainer import StalenessPolicy
from skyrl_async.inference.generation import GenerationState, generate_to_end
from skyrl_async.metrics.run_totals import BoundCost, RunTotals, needed_bound
from skyrl_async.metrics.step import StepFigures
from skyrl_async.rollout.staleness import STALENESS_POLICIES
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledEngine
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import EngineOutput, EngineRequest, Group, PauseMode, Trajectory
from tests.cpu.advantage_columns import row_advantages

LONG_TAILED = SimulationSettings(
    mean_tokens=100.0, sigma=1.2, num_steps=12, seconds_per_token=1e-4, load_seconds=0.5, step_seconds=1.0
)


def simulate(settings: SimulationSettings, **parts) -> Simulation:
    async def main() -> Simulation:
        simulation = Simulation(settings, **parts)
        await simulation.trainer.run()
        return simulation

    return run_in_virtual_time(main())


def logged(simulation: Simulation, name: str) -> list[float]:
    return [values[name] for _, values in simulation.logged if name in values]


def trained_lags(simulation: Simulation) -> list[int]:
    """Of every token in every gradient: version trained at minus version sampled under."""
    return [
        version - sampled_under
        for version, step in enumerate(simulation.policy.steps)
        for group in step
        for row in group
        for sampled_under, is_trained in zip(row.versions, row.loss_mask, strict=True)
        if is_trained
    ]


@pytest.mark.slow
@given(
    bound=st.integers(0, 3),
    sigma=st.sampled_from([0.8, 1.5]),
    seed=st.integers(0, 3),
    mode=st.sampled_from(PauseMode),
    streamed=st.booleans(),
)
def test_contract_2_mask_trains_no_token_past_the_bound_and_waits_for_none(
    bound: int, sigma: float, seed: int, mode: PauseMode, streamed: bool
) -> None:
    settings = replace(
        LONG_TAILED, max_staleness_steps=bound, sigma=sigma, seed=seed, pause_mode=mode, stream_mini_batch=streamed
    )
    simulation = simulate(replace(settings, staleness_policy="mask"))
    totals = simulation.trainer.totals
    lags = trained_lags(simulation)
    assert max(lags) <= bound and max(logged(simulation, "async/token_lag_max")) == max(lags)
    assert totals.staleness_wait_seconds == totals.wasted_tokens == 0
    assert totals.trained_groups == settings.num_steps * settings.mini_batch_size
    assert totals.trained_tokens == len(lags) == totals.generated_tokens - totals.masked_tokens


@pytest.mark.slow
@given(
    bound=st.integers(0, 3),
    window=st.integers(1, 8),
    seed=st.integers(0, 3),
    mode=st.sampled_from(PauseMode),
    streamed=st.booleans(),
)
def test_contract_2_window_trains_no_group_past_its_bound_and_drops_none(
    bound: int, window: int, seed: int, mode: PauseMode, streamed: bool
) -> None:
    settings = replace(LONG_TAILED, staleness_policy="window", max_staleness_steps=bound, seed=seed, sigma=1.5)
    settings = replace(
        settings, mini_batch_size=4, staleness_window_groups=min(window, 4 * (bound + 1)), stream_mini_batch=streamed
    )
    simulation = simulate(replace(settings, pause_mode=mode))
    totals, extra = simulation.trainer.totals, simulation.staleness.window_steps
    assert totals.staleness_max <= bound + extra and extra <= 2
    assert totals.groups_over_bound == totals.wasted_tokens == totals.masked_tokens == 0
    assert totals.trained_groups == simulation.workers.counts["groups"] == settings.num_steps * 4


@pytest.mark.slow
@given(
    policy=st.sampled_from(["wait", "window", "mask", "resample"]),
    num_mini_batches=st.integers(1, 2),
    num_epochs=st.integers(1, 3),
    num_ahead=st.integers(0, 2),
    seed=st.integers(0, 3),
)
def test_contract_2_no_pass_over_a_batch_of_several_optimizer_steps_trains_past_the_bound(
    policy: str, num_mini_batches: int, num_epochs: int, num_ahead: int, seed: int
) -> None:
    num_steps = num_mini_batches * num_epochs
    bound = num_steps * (num_ahead + 1) - 1
    settings = replace(LONG_TAILED, mini_batch_size=4, train_batch_size=4 * num_mini_batches, num_steps=6 * num_steps)
    settings = replace(settings, update_epochs_per_batch=num_epochs, max_staleness_steps=bound, seed=seed, sigma=1.5)
    simulation = simulate(replace(settings, staleness_policy=policy))
    totals, extra = simulation.trainer.totals, simulation.staleness.window_steps
    assert max(trained_lags(simulation)) <= bound + extra
    assert policy == "mask" or totals.staleness_max <= bound + extra
    assert totals.trained_groups == 6 * 4 * num_mini_batches and simulation.trainer.trained_version == 6 * num_steps
    passes = Counter(
        rows[0].prompt_token_ids.tobytes()
        for step in simulation.policy.steps
        for rows in step
        if any(r.loss_mask.any() for r in rows)
    )
    assert policy == "mask" or set(passes.values()) == {num_epochs}
    assert len(simulation.policy.steps) == 6 * num_steps + 1


def test_a_straggler_holds_up_less_with_a_window_and_is_trained_past_the_steps_that_admission_allows() -> None:
    def run(window: int) -> RunTotals:
        settings = replace(LONG_TAILED, staleness_policy="window", max_staleness_steps=1, num_steps=20)
        return simulate(replace(settings, staleness_window_groups=window)).trainer.totals

    strict, windowed = run(1), run(9)
    assert strict.staleness_max <= 1 < windowed.staleness_max <= 2
    assert windowed.staleness_wait_seconds < strict.staleness_wait_seconds
    assert windowed.training_seconds < strict.training_seconds
    assert strict.groups_over_bound == windowed.groups_over_bound == 0


def test_old_requests_weigh_as_much_with_a_window_as_with_wait() -> None:
    of_policy = {
        policy: placement(from_overrides("engine.num_engines=2", f"trainer.staleness_policy={policy}"))
        for policy in STALENESS_POLICIES
    }
    assert of_policy["window"] == of_policy["wait"] != of_policy["allow"]


@pytest.mark.slow
@given(bound=st.integers(0, 3), sigma=st.sampled_from([0.8, 1.5]), seed=st.integers(0, 5), streamed=st.booleans())
def test_contract_2_resample_trains_no_group_past_the_bound_and_each_uid_once(
    bound: int, sigma: float, seed: int, streamed: bool
) -> None:
    settings = replace(
        LONG_TAILED,
        staleness_policy="resample",
        max_staleness_steps=bound,
        sigma=sigma,
        seed=seed,
        stream_mini_batch=streamed,
        num_steps=None,
        num_epochs=2,
        num_prompts=45,
    )
    simulation = simulate(settings)
    assert max(logged(simulation, "async/staleness_max")) <= bound
    assert simulation.trainer.totals.staleness_wait_seconds == 0
    trained = Counter(tuple(group[0].prompt_token_ids.tolist()) for step in simulation.policy.steps for group in step)
    states = simulation.dataloader.statistics()
    assert max(trained.values()) <= 2
    assert states["trained_total"] == trained.total() == 90 - states["filtered_total"]
    assert states["filtered_total"] <= settings.mini_batch_size, "only where no group is left to draw again"
    assert states["running"] == states["finished"] == states["new"] == simulation.staleness.num_running == 0


def test_groups_dropped_by_resample_are_drawn_again_and_counted_as_wasted() -> None:
    simulation = simulate(replace(LONG_TAILED, staleness_policy="resample", max_staleness_steps=1))
    totals, counts = simulation.trainer.totals, simulation.workers.counts
    assert totals.requeued_groups == counts["requeued_groups"] > 0
    assert totals.trained_groups == LONG_TAILED.num_steps * LONG_TAILED.mini_batch_size
    sampled = sum(engine.num_sampled_tokens for engine in simulation.engines)
    assert totals.generated_tokens + totals.wasted_tokens >= sampled - 1
    assert totals.wasted_tokens == sampled - totals.trained_tokens > 0
    assert totals.length_ratio < 1, "long answers are lost"


class OneCallEngine(ModelledEngine):
    """Goes on with what a weight update aborts by itself, as engines in processes of their own do, and hands over all in the end."""

    def __init__(self, engine: ModelledEngine) -> None:
        super().__init__(engine.name, num_tokens_of=engine.num_tokens_of, load_seconds=engine.load_seconds)
        self._open: dict[str, GenerationState] = {}

    async def generate(self, request: EngineRequest) -> EngineOutput:
        joined = self._open[request.request_id] = GenerationState()
        try:
            return await generate_to_end(_Segments(self), request, joined)
        finally:
            del self._open[request.request_id]

    async def partial_outputs(self, request_ids: Collection[str]) -> dict[str, EngineOutput]:
        found = {i: self._open[i] for i in request_ids if i in self._open}
        held = await super().partial_outputs([joined.call_id for joined in found.values() if joined.call_id])
        for joined in found.values():
            joined.set_engine_output(held)
        return {i: joined.partial_output() for i, joined in found.items()}


class _Segments:
    """The calls that a weight update ends."""

    def __init__(self, engine: ModelledEngine) -> None:
        self.name = engine.name
        self._engine = engine

    async def generate(self, request: EngineRequest) -> EngineOutput:
        return await ModelledEngine.generate(self._engine, request)


def test_tokens_that_an_engine_has_not_delivered_when_a_group_is_dropped_are_counted() -> None:
    engines: list[ModelledEngine] = []

    def around(engine: ModelledEngine) -> ModelledEngine:
        engines.append(OneCallEngine(engine))
        return engines[-1]

    settings = replace(LONG_TAILED, staleness_policy="resample", max_staleness_steps=1, load_seconds=0.2)
    totals = simulate(settings, engine_around=around).trainer.totals
    assert totals.requeued_groups > 3
    assert sum(engine.num_sampled_tokens for engine in engines) == totals.trained_tokens + totals.wasted_tokens


@pytest.mark.slow
def test_the_tokens_of_a_dropped_group_include_its_finished_samples() -> None:
    simulation = simulate(replace(LONG_TAILED, staleness_policy="resample", max_staleness_steps=1, group_size=8))
    delivered, totals = simulation.client.statistics()["tokens_total"], simulation.trainer.totals
    assert simulation.workers.counts["requeued_tokens"] == delivered - totals.trained_tokens > 0
    assert totals.generated_tokens < delivered, "groups were given up of which some members had finished"


@pytest.mark.slow
def test_without_a_tail_every_policy_trains_the_same_groups() -> None:
    steps = {}
    for policy in STALENESS_POLICIES:
        simulation = simulate(replace(LONG_TAILED, sigma=0.0, staleness_policy=policy, oldest_weight=1.0))
        steps[policy] = simulation.policy.steps
        assert simulation.trainer.totals.wasted_tokens == simulation.trainer.totals.masked_tokens == 0
    assert all(trained == steps["wait"] for trained in steps.values())


def group_of(versions: list[list[int]], loss_masks: list[list[int]] | None = None) -> Group:
    masks = loss_masks or [[1] * len(row) for row in versions]
    rows = tuple(
        Trajectory(
            prompt_token_ids=(1,),
            response_token_ids=tuple(range(len(row))),
            loss_mask=tuple(mask),
            logprobs=(-0.5,) * len(row),
            versions=tuple(row),
            reward=float(index),
        )
        for index, (row, mask) in enumerate(zip(versions, masks, strict=True))
    )
    return Group(uid="u", admission_index=0, scheduled_version=0, trajectories=rows)


@given(
    rows=st.lists(st.lists(st.integers(-1, 6), max_size=8), min_size=1, max_size=4),
    version=st.integers(6, 8),
    bound=st.integers(0, 4),
)
def test_masked_tokens_keep_their_place_and_all_else(rows: list[list[int]], version: int, bound: int) -> None:
    """Version -1 is the environment's; its tokens were never trained."""
    whole = group_of(rows, [[int(v >= 0) for v in row] for row in rows])
    part = STALENESS_POLICIES["mask"].masked_group(whole, version, bound)
    for row, trained in zip(whole.trajectories, part.trajectories, strict=True):
        assert trained.loss_mask.tolist() == [v >= 0 and version - v <= bound for v in row.versions]
        assert replace(trained, loss_mask=row.loss_mask) == row
    rewards: list[float] = []
    row_advantages(part.trajectories, lambda r: rewards.extend(r) or [0.0] * len(r))
    assert rewards == [row.reward for row in whole.trajectories], "advantages are of whole trajectories"


@pytest.mark.parametrize("policy", ["wait", "window", "resample", "allow"])
def test_other_policies_train_groups_as_they_are(policy: str) -> None:
    whole = group_of([[0, 0, 5]])
    assert STALENESS_POLICIES[policy].masked_group(whole, 9, 1) is whole


def test_a_step_whose_tokens_are_all_masked_counts_a_version_and_divides_by_no_zero() -> None:
    figures = StepFigures(trained_version=5, max_staleness_steps=1)
    whole = group_of([[0, 1], [2]])
    part = STALENESS_POLICIES["mask"].masked_group(whole, 5, 1)
    figures.add_group(part, {"num_tokens": 0.0}, whole.num_sampled_tokens - part.num_sampled_tokens)
    assert (figures.num_tokens, figures.num_masked_tokens, figures.loss_denominator) == (0, 3, 1.0)
    figures.add_seconds("step", 1.0)
    assert figures.values()["async/masked_frac"] == 1.0
    totals = RunTotals()
    totals.add_step(figures)
    assert totals.trained_groups == 1
    assert "100.0% of the tokens were masked" in totals.summary()["staleness_bound"]
    assert figures.trains_nothing and totals.summary()["all_masked_steps"] == 1


def test_a_step_without_sampled_tokens_stays_an_error_where_nothing_was_masked() -> None:
    figures = StepFigures(trained_version=0, max_staleness_steps=1)
    figures.add_group(group_of([[]]), {})
    assert figures.loss_denominator == 0


def test_the_totals_that_a_checkpoint_holds_do_not_grow_with_the_run() -> None:
    figures = StepFigures(trained_version=0, max_staleness_steps=1)
    figures.add_group(group_of([[0]]), {})
    figures.add_seconds("step", 1.0)
    totals = RunTotals()
    for step in range(1500):
        totals.pauses.append(float(step))
        totals.add_step(figures)
    assert totals.pauses == [float(step) for step in range(500, 1500)]


def test_every_value_of_the_key_has_a_policy() -> None:
    assert list(STALENESS_POLICIES) == [policy.name for policy in StalenessPolicy]


@pytest.mark.slow
def test_every_second_waited_for_the_bound_is_attributed_to_the_late_group() -> None:
    simulation = simulate(replace(LONG_TAILED, max_staleness_steps=1))
    totals = simulation.trainer.totals
    assert totals.staleness_wait_seconds > 0
    assert sum(totals.bound_cost.seconds_by_uid.values()) == pytest.approx(totals.staleness_wait_seconds)
    assert totals.bound_cost.seconds == pytest.approx(totals.staleness_wait_seconds)
    worst, seconds = totals.bound_cost.costliest(1)[0]
    sentence = totals.summary()["staleness_bound"]
    assert f"most for {worst} ({seconds:.1f} s)" in sentence and "trainer.max_staleness_steps=1 cost" in sentence


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_bound_that_is_said_to_cost_less_does(seed: int) -> None:
    settings = replace(LONG_TAILED, max_staleness_steps=1, num_steps=24, seed=seed)
    cost = simulate(settings).trainer.totals
    cheaper = cost.bound_cost.cheaper_bound()
    assert cheaper is not None and cheaper > 1
    again = simulate(replace(settings, max_staleness_steps=cheaper)).trainer.totals
    assert again.staleness_wait_seconds < 0.35 * cost.staleness_wait_seconds
    assert again.training_seconds < cost.training_seconds


@pytest.mark.slow
def test_a_step_that_waited_for_the_bound_logs_the_groups_it_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="skyrl_async.metrics.recorder"):
        simulation = simulate(replace(LONG_TAILED, max_staleness_steps=1))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == sum(seconds > 0 for seconds in logged(simulation, "timing/wait_for_staleness"))
    worst, _ = simulation.trainer.totals.bound_cost.costliest(1)[0]
    assert any(f"s to hold the staleness bound, longest for {worst} (" in line for line in lines)


def test_the_summary_says_when_nothing_was_waited_for() -> None:
    sentence = simulate(replace(LONG_TAILED, sigma=0.0)).trainer.totals.summary()["staleness_bound"]
    assert sentence == "trainer.max_staleness_steps=2 cost no waiting"


def test_the_needed_bound_is_the_staleness_without_the_wait() -> None:
    assert needed_bound(2, 0.0, 5.0) == 2
    assert needed_bound(2, 0.1, 5.0) == 3
    assert needed_bound(2, 12.0, 5.0) == 5
    assert needed_bound(7, 12.0, 5.0, num_steps=4) == 19


@given(waits=st.lists(st.tuples(st.integers(0, 500), st.floats(0.01, 10.0), st.integers(1, 9)), max_size=600))
def test_the_costliest_uids_are_kept_and_no_second_is_lost(waits: list[tuple[int, float, int]]) -> None:
    cost = BoundCost()
    for uid, seconds, bound in waits:
        cost.add(f"p{uid}", seconds=seconds, needed_bound=bound)
    assert cost.seconds == pytest.approx(sum(seconds for _, seconds, _ in waits))
    assert len(cost.seconds_by_uid) <= 400
    cheaper = cost.cheaper_bound()
    assert (cheaper is None) == (not waits)
    if cheaper is not None:
        covered = sum(seconds for _, seconds, bound in waits if bound <= cheaper)
        assert covered >= 0.9 * cost.seconds * (1 - 1e-9)
    assert RunTotals(bound_cost={"seconds_by_uid": {}, "seconds_by_bound": {"3": 1.0}}).bound_cost.cheaper_bound() == 3
