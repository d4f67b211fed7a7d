"""What each staleness policy costs: the real loop over modelled engines, in virtual time.

Mini-batches of 64 groups of 8; 8 engines whose requests each run at 1 / (1 + n / 170) of full speed with n of them running; lengths
lognormal with a mean of 1,000 tokens before the cut at eight times that; training takes as long as generation at 2,048 in flight; as many
groups in flight as the credits allow. Weights are published in no time, and requests freeze meanwhile. To be quick, one modelled
token stands for ten.

The *limit* is max(training, longest answer of a mini-batch at full speed / (bound + 1)) per step: no schedule with a hard bound and
no waste is faster. Steps are counted from the ninth to the last after which groups are admitted. They come in waves of S + 1, and not
all of these are whole: counted in whole waves, the ratio of two rows at S = 2 was 5 % another. A row of one seed is good to about 3 %, so
those of ``wait`` at the bounds 0, 1, 2, 4, 8 are means over three.

*S* says how many groups are admitted. The bound is S, but for ``window``, whose window raises it (S + ``window_steps``); ``wait`` has
rows at these bounds, too.

Beside the policies of ``trainer.staleness_policy`` there are the rules of other systems, with requests spread by number, as in
``wait_alike``. Commits are those read.

    areal               groups trained in order of arrival under the capacity rule alone (AReaL; so does verl's fully_async_policy)
    prime_rl            order of arrival, and what is too old is dropped
    torchtitan_fifo     order of admission: experiments/rl/components/work_buffer.py with window_fraction=None (b5bcd76)
    torchtitan_window   the same with its default window, 0.3 of the (S + 1) mini-batches that may be open
    tinker              rl/train.py of tinker-cookbook (9dfcc3a): always a mini-batch of groups in flight, whatever has finished; order of
                        arrival; a group that is too old when it is taken is dropped, and its prompt drawn again
    verl_wait           trainer/ppo/v1/replay_buffer.py of verl (1dda039) with max_off_policy_strategy=wait, max_off_policy_threshold=S + 1
                        and num_warmup_batches=S: a step begins when no group aged S is running and a mini-batch is finished, and takes
                        the oldest ones

What is not modelled: torchtitan fills the next mini-batch while one is trained (the same groups, so the same speed), tinker draws a
dropped prompt again after those that wait, verl looks every 2 s.
"""

import gc
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any, ClassVar

from benchmarks.report import arguments, conditions, report
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import KeptGroups, ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings, lognormal_length
from skyrl_async.types import Group, PauseMode, Trajectory

SIGMAS = (0.5, 0.8, 1.2)
BOUNDS = (0, 1, 2, 4, 8)
WINDOW_BOUNDS = (3, 6, 11)
"""Bounds of ``window`` that are not among ``BOUNDS``; ``wait`` has rows there, for comparison."""
POLICIES = ("wait", "wait_alike", "mask", "resample", "allow", "areal", "prime_rl")
COMPARED = {
    "areal": "allow",
    "prime_rl": "resample",
    "tinker": "resample",
    "torchtitan_fifo": "wait",
    "torchtitan_window": "wait",
    "verl_wait": "wait",
    "window": "wait",
}
"""Rule -> our policy with the same promise (none; a bound, with waste; a bound without waste), to compare at an equal bound."""
ALL_POLICIES = tuple(dict.fromkeys((*POLICIES, *COMPARED)))
_WHOLE_ONLY = ("torchtitan_fifo", "torchtitan_window", "verl_wait")
"""Rules of systems that train whole mini-batches alone."""
_UNLIMITED_STEPS = 1000
PLAIN_SHARES = {
    (0.5, 1): (0.74, 0.83),
    (0.5, 4): (0.59, 0.64),
    (0.8, 1): (0.83, 0.89),
    (0.8, 4): (0.72, 0.76),
    (0.8, 8): (0.64, 0.67),
    (1.2, 4): (0.77, 0.81),
}
"""(sigma, S) -> share of the limit that a plain model of ``wait`` reached, whole mini-batches and streamed."""

_NUM_ENGINES = 8
_HALF_SPEED_REQUESTS = 170.0
_WARM_UP_STEPS = 8
_KEYS = ("policy", "streamed", "sigma", "staleness", "bound")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    policy: str
    streamed: bool
    sigma: float
    staleness: int
    seed: int
    num_steps: int
    mini_batch_size: int = 64

    OWN_POLICY: ClassVar[dict[str, str]] = {
        "wait_alike": "wait",
        "areal": "allow",
        "prime_rl": "resample",
        "tinker": "allow",
        "torchtitan_fifo": "window",
        "torchtitan_window": "window",
        "verl_wait": "allow",
    }
    """Row -> the policy that it runs under; what that lacks of the rule, its buffer has."""

    @property
    def settings(self) -> SimulationSettings:
        in_flight = 32 * self.mini_batch_size
        policy = self.OWN_POLICY.get(self.policy, self.policy)
        is_tinker = self.policy == "tinker"
        return SimulationSettings(
            mini_batch_size=self.mini_batch_size,
            group_size=8,
            max_staleness_steps=_UNLIMITED_STEPS if is_tinker else self.staleness,
            staleness_policy=policy,
            staleness_window_groups=1 if self.policy == "torchtitan_fifo" else None,
            num_workers=self.mini_batch_size if is_tinker else None,
            oldest_weight=None if policy == self.policy else 1.0,
            num_steps=self.num_steps,
            num_prompts=4096,
            num_engines=_NUM_ENGINES,
            tokens_per_second=1.0,
            half_speed_requests=_HALF_SPEED_REQUESTS,
            block_tokens=1 << 20,
            mean_tokens=100.0,
            sigma=self.sigma,
            seconds_per_token=(1 + in_flight / _NUM_ENGINES / _HALF_SPEED_REQUESTS) / in_flight,
            stream_mini_batch=self.streamed,
            pause_mode=PauseMode.KEEP,
            seed=self.seed,
        )


class ArrivalBuffer(GroupBuffer):
    """Hands out groups in the order in which they were finished."""

    def __init__(self, max_groups: int) -> None:
        super().__init__(max_groups)
        self._num_arrived = 0
        self._arrived: dict[int, Group] = {}

    def put(self, group: Group) -> None:
        """See ``GroupBuffer``."""
        self._arrived[self._num_arrived] = group
        super().put(replace(group, admission_index=self._num_arrived))
        self._num_arrived += 1

    async def get(self, is_allowed: Any) -> Group | None:
        """See ``GroupBuffer``."""
        group = await super().get(is_allowed)
        return None if group is None else self._arrived.pop(group.admission_index)


class TinkerBuffer(ArrivalBuffer):
    """Drops a group that is too old when it is taken. Set ``simulation`` and ``bound`` before it is used."""

    simulation: Simulation
    bound: int

    async def get(self, is_allowed: Any) -> Group | None:
        """See ``GroupBuffer``."""
        while group := await super().get(is_allowed):
            if self.simulation.staleness.trained_version - group.scheduled_version <= self.bound:
                break
            await self.simulation.workers.requeue_finished(group)
        return group


class VerlBuffer(GroupBuffer):
    """Gives a mini-batch when it is complete and no group of the bound's age is running. Set ``simulation`` and ``bound`` before."""

    simulation: Simulation
    bound: int
    _num_left = 0

    def can_give(self, is_allowed: Any) -> bool:
        """See ``GroupBuffer``."""
        if self._num_left or self._is_closed:
            return super().can_give(is_allowed)
        staleness = self.simulation.staleness
        oldest = next((group for index, group in staleness._open.items() if index in staleness._running), None)
        is_late = oldest is not None and staleness.trained_version - oldest.scheduled_version >= self.bound
        return not is_late and len(self) >= staleness.mini_batch_size

    async def get(self, is_allowed: Any) -> Group | None:
        """See ``GroupBuffer``."""
        group = await super().get(is_allowed)
        self._num_left = (self._num_left or self.simulation.staleness.mini_batch_size) - 1
        return group


_BUFFERS = {"areal": ArrivalBuffer, "prime_rl": ArrivalBuffer, "tinker": TinkerBuffer, "verl_wait": VerlBuffer}


class KnowingGenerator(ModelledGenerator):
    """Remembers how long every answer that was begun would have become."""

    def __init__(self, sampler: InferenceEngineClient, settings: SimulationSettings) -> None:
        super().__init__(sampler)
        self._length = lognormal_length(settings.mean_tokens, settings.sigma, settings.seed)
        self.begun: dict[int, list[int]] = {}
        """Admission index -> lengths."""

    async def _one(self, request: GroupRequest, index: int, seed: int) -> Trajectory:
        prompt = tuple(ord(c) for c in request.prompt.uid)
        self.begun.setdefault(request.priority, []).append(self._length(prompt, seed))
        return await super()._one(request, index, seed)

    @property
    def mean_length(self) -> float:
        """Of the answers begun."""
        return fmean(length for lengths in self.begun.values() for length in lengths)

    def mean_longest(self, mini_batch_size: int) -> float:
        """Longest answer of a mini-batch, mean over mini-batches in order of admission."""
        longest = [max(lengths) for _, lengths in sorted(self.begun.items())]
        batches = range(0, len(longest) - mini_batch_size + 1, mini_batch_size)
        return fmean(max(longest[start : start + mini_batch_size]) for start in batches)


def measure(case: Case) -> dict[str, Any]:
    """Run one case; its row."""
    settings, started = case.settings, time.process_time()
    simulation, generator, ages = run_in_virtual_time(_simulate(case, settings))
    bound = case.staleness + simulation.staleness.window_steps
    steps = [values for _, values in simulation.logged if "timing/step" in values]
    steady = steps[_WARM_UP_STEPS : -(case.staleness + 1)]
    step_seconds = fmean(values["timing/step"] for values in steady)
    train_seconds = settings.mini_batch_size * settings.group_size * generator.mean_length * settings.seconds_per_token
    longest = generator.mean_longest(settings.mini_batch_size) / settings.tokens_per_second
    limit = max(train_seconds, longest / (bound + 1))
    totals = simulation.trainer.totals
    sampled = sum(engine.num_sampled_tokens for engine in simulation.engines)
    used = totals.trained_tokens + totals.masked_tokens
    return {
        "seed": case.seed,
        "policy": case.policy,
        "streamed": case.streamed,
        "sigma": case.sigma,
        "staleness": case.staleness,
        "bound": bound,
        "utilisation": fmean(values["timing/forward_backward"] for values in steady) / step_seconds,
        "share_of_limit": limit / step_seconds,
        "over_share": sum(age > bound for age in ages) / len(ages),
        "staleness_mean": fmean(ages),
        "wasted_share": (sampled - used) / sampled,
        "masked_frac": totals.masked_tokens / used,
        "length_ratio": totals.trained_tokens / totals.trained_trajectories / generator.mean_length,
        "step_s": step_seconds,
        "cpu_s": time.process_time() - started,
    }


async def _simulate(case: Case, settings: SimulationSettings) -> tuple[Simulation, KnowingGenerator, list[int]]:
    """Run it; also returns the staleness of every trained group."""
    generators: list[KnowingGenerator] = []
    record = KeptGroups()

    def make_generator(client: InferenceEngineClient) -> KnowingGenerator:
        generators.append(KnowingGenerator(client, settings))
        return generators[0]

    simulation = Simulation(
        settings,
        generator_over=make_generator,
        make_buffer=_BUFFERS.get(case.policy, GroupBuffer),
        record=record,
    )
    if isinstance(simulation.buffer, TinkerBuffer | VerlBuffer):
        simulation.buffer.simulation, simulation.buffer.bound = simulation, case.staleness
    gc.collect()
    gc.disable()  # the run is short and leaves little cyclic garbage: looking for it is not worth its time
    try:
        await simulation.trainer.run()
    finally:
        gc.enable()
    ages = [step - 1 - group.scheduled_version for step, group in record.trained]
    return simulation, generators[0], ages


def num_steps(staleness: int) -> int:
    """Of a run: what a bound holds back comes in waves of S + 1 steps, of which several have to be seen."""
    return 24 + 7 * (staleness + 1)


def cases(*, is_quick: bool, seed: int, num_seeds: int | None, only: list[str] | None) -> list[Case]:
    """Every run, the long ones first."""
    usual = {} if is_quick else {("wait", bound): 3 for bound in BOUNDS}
    sigmas, bounds = ((0.8,), (1, 2, 4)) if is_quick else (SIGMAS, sorted((*BOUNDS, *WINDOW_BOUNDS)))
    return [
        Case(policy=policy, streamed=streamed, sigma=sigma, staleness=bound, seed=seed + i, num_steps=num_steps(bound))
        for bound, sigma, policy, streamed in product(reversed(bounds), sigmas, only or ALL_POLICIES, (False, True))
        if (policy == "wait" or bound in BOUNDS) and not (streamed and policy in _WHOLE_ONLY)
        for i in range(num_seeds or usual.get((policy, bound), 1))
    ]


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for all seeds of a case."""
    together: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        together.setdefault(tuple(row[name] for name in _KEYS), []).append(row)
    return [
        {
            name: value if name in _KEYS else fmean(row[name] for row in same)
            for name, value in same[0].items()
            if name != "seed"
        }
        for same in together.values()
    ]


def at_equal_bounds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much faster our policy makes steps than each rule of ``COMPARED`` at the same bound, tail and seed.

    ``speed_alike``: both train whole mini-batches, or both are streamed; ``speed_streamed``: ours is streamed, as it is by default.
    """
    keys = ("policy", "streamed", "sigma", "staleness", "seed")
    row_of = {tuple(row[key] for key in keys): row for row in rows}
    found = []
    for row in rows:
        if (own := COMPARED.get(row["policy"])) and row["seed"] == min(other["seed"] for other in rows):
            alike, streamed = (
                row_of.get((own, is_streamed, row["sigma"], row["bound"], row["seed"]))
                for is_streamed in (row["streamed"], True)
            )
            told = (*_KEYS, "over_share", "wasted_share", "length_ratio", "staleness_mean")
            found.append(
                {name: row[name] for name in told}
                | {
                    "own_policy": own,
                    "own_staleness_mean": alike and alike["staleness_mean"],
                    "speed_alike": alike and row["step_s"] / alike["step_s"],
                    "speed_streamed": streamed and row["step_s"] / streamed["step_s"],
                }
            )
    return found


def goals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the figures say of the promises. AReaL trains whole mini-batches."""
    row_of = {(row["policy"], row["streamed"], row["sigma"], row["staleness"]): row for row in rows}
    waiting = [row for row in rows if row["policy"] == "wait"]
    against_areal = [
        row["utilisation"] / row_of["areal", False, row["sigma"], row["staleness"]]["utilisation"]
        for row in rows
        if row["policy"] == "allow" and row["streamed"] and ("areal", False, row["sigma"], row["staleness"]) in row_of
    ]
    margins = {
        f"sigma {sigma} S {bound} {'streamed' if streamed else 'whole'}": row_of["wait", streamed, sigma, bound][
            "share_of_limit"
        ]
        - PLAIN_SHARES[sigma, bound][streamed]
        for (sigma, bound), streamed in product(PLAIN_SHARES, (False, True))
        if ("wait", streamed, sigma, bound) in row_of
    }
    return {
        "wait_over_share_max": max((row["over_share"] for row in waiting), default=None),
        "wait_wasted_share_max": max((row["wasted_share"] for row in waiting), default=None),
        "wait_length_ratio_range": [f(row["length_ratio"] for row in waiting) for f in (min, max)] if waiting else None,
        "wait_share_over_the_plain_models": margins,
        "wait_least_margin": min(margins.values(), default=None),
        "allow_streamed_over_areal": [min(against_areal), max(against_areal)] if against_areal else None,
    }


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--num-seeds",
        type=int,
        help="runs of each row, from --seed on (default 3 of wait at most bounds, 1 of the others)",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at once")
    parser.add_argument("--policy", action="append", choices=ALL_POLICIES, help="only this one; may be repeated")
    options = parser.parse_args()
    planned = cases(is_quick=options.quick, seed=options.seed, num_seeds=options.num_seeds, only=options.policy)
    seeds = {policy: sorted({case.seed for case in planned if case.policy == policy}) for policy in ALL_POLICIES}
    under = conditions(
        seeds=seeds, is_quick=options.quick, num_steps={s: num_steps(s) for s in (*BOUNDS, *WINDOW_BOUNDS)}
    )
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        rows = []
        for row in pool.map(measure, planned):
            rows.append(row)
            print(f"[{len(rows)}/{len(planned)}] {row['policy']} S={row['staleness']} sigma={row['sigma']}", flush=True)
    compared = at_equal_bounds(rows)
    rows = sorted(means(rows), key=lambda row: (row["sigma"], row["staleness"], row["streamed"]))
    figures = goals(rows) | {"conditions": under, "at_equal_bounds": compared}
    report("staleness policies", figures, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
