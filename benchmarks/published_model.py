"""One published setting in the simulator: virtual seconds tied to real ones by its synchronous row, and the schedules over it.

Flows in: a setting, how much of it to simulate, a seed. Flows out: seconds per step. Knows no asynchronous row. What is assumed
stands in ``benchmarks.published_results``.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.published_settings import Schedule, Setting, Sweep
from benchmarks.staleness_policies import ArrivalBuffer
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import PauseMode

CALIBRATION_SEED = 1000
"""Added to the seed: the lengths that tie virtual seconds to real ones are not those that are measured."""
MEAN_TOKENS = 100.0
"""Of a modelled answer before the cut."""
WHOLE_BATCHES = SimulationSettings(
    max_staleness_steps=0,
    num_prompts=4096,
    tokens_per_second=1.0,
    block_tokens=1 << 20,
    mean_tokens=MEAN_TOKENS,
    stream_mini_batch=False,
    pause_mode=PauseMode.KEEP,
)
"""Each is generated before it is trained; training takes no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is simulated, and how long."""

    max_answers: int
    """Of a step; a larger batch is cut."""
    sync_steps: int
    """Of a run whose batches are generated one after the other."""
    least_steps: int
    """Counted of any other run."""
    least_waves: int
    """A bound holds back in waves of ``bound + 1`` steps: whole ones are counted, at least so many."""

    def num_steps(self, bound: int) -> int:
        """Of a run with this bound: one wave and a step to fill, what is counted, and one to drain."""
        return (max(self.least_waves, -(-self.least_steps // (bound + 1))) + 2) * (bound + 1) + 1


FULL = Scale(max_answers=1024, sync_steps=16, least_steps=16, least_waves=3)
QUICK = Scale(max_answers=512, sync_steps=10, least_steps=6, least_waves=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a simulation showed; virtual seconds, without the steps in which it fills and drains."""

    step_s: tuple[float, ...]
    generate_s: tuple[float, ...]
    """Per step, waiting for groups."""
    tokens: float
    """Of a step."""
    over_share: float
    """Of groups, past the bound."""
    total_s: float
    cpu_s: float

    @property
    def mean_step_s(self) -> float:
        """Of a step."""
        return fmean(self.step_s)


def simulate(settings: SimulationSettings, *, is_in_arrival_order: bool = False) -> Ran:
    """Run the real loop over modelled engines and trainer."""
    started = time.process_time()
    simulation = run_in_virtual_time(_run(settings, ArrivalBuffer if is_in_arrival_order else GroupBuffer))
    steps = [values for _, values in simulation.logged if "timing/step" in values]
    bound = settings.max_staleness_steps
    steady = steps[bound + 2 : -(bound + 1)] if bound else steps
    totals = simulation.trainer.totals
    return Ran(
        step_s=tuple(values["timing/step"] for values in steady),
        generate_s=tuple(values["timing/wait_for_groups"] for values in steady),
        tokens=totals.trained_tokens / len(steps),
        over_share=totals.groups_over_bound / totals.trained_groups,
        total_s=sum(values["timing/step"] for values in steps),
        cpu_s=time.process_time() - started,
    )


async def _run(settings: SimulationSettings, make_buffer: Callable[[int], GroupBuffer]) -> Simulation:
    simulation = Simulation(settings, make_buffer=make_buffer)
    gc.collect()
    gc.disable()  # the run is short and leaves little cyclic garbage: looking for it is not worth its time
    try:
        await simulation.trainer.run()
    finally:
        gc.enable()
    return simulation


class Model:
    """One setting, cut to size, with virtual seconds tied to real ones by its synchronous row.

    Args:
        setting: what is modelled.
        scale: how much of it.
        seed: of the lengths drawn.
    """

    def __init__(self, setting: Setting, scale: Scale, seed: int) -> None:
        self.setting = setting
        self._scale = scale
        self._seed = seed
        self._cut = _cut(setting, scale.max_answers)
        drawn = simulate(self._settings(self._sync_devices, seed=seed + CALIBRATION_SEED))
        self._tokens = drawn.tokens
        generate, sync = fmean(drawn.generate_s), setting.synchronous
        if setting.is_balanced:
            training = self._tokens / (self._num_engines(self._sync_devices) * setting.half_speed_requests)
            self._unit_s = sync.step_s / (generate + training)
            self._training_s = training * self._unit_s
        else:
            self._unit_s = sync.generate_s / generate
            self._training_s = setting.training_s(setting.devices, has_old_logprobs=True)

    def synchronous_s(self) -> float:
        """Seconds per step of the synchronous schedule, for lengths that did not fix the scale."""
        sync = self.setting.synchronous
        other_s = 0.0 if self.setting.is_balanced else sync.switch_s + sync.other_s
        ran = simulate(self._trained(self._settings(self._sync_devices), self._training_s, other_s))
        return ran.mean_step_s * self._unit_s

    def modelled_s(self, generation_devices: int) -> float:
        """Seconds per step of the other system's schedule; partial rollouts generate on every device, in turns with training."""
        setting, schedule = self.setting, self.setting.schedule
        if schedule is Schedule.PARTIAL:
            return self._partial_s()
        if schedule in (Schedule.FULLY_ASYNC, Schedule.AREAL):
            return self._streamed_s(generation_devices)
        generate_s = self.generation_s(generation_devices)
        training_s, other_s = self._split_training_s(generation_devices, has_old_logprobs=True)
        if schedule is Schedule.ONE_STEP_OFF:
            return one_step_off_s(generate_s, training_s + other_s)
        sync, left = setting.synchronous, setting.devices - generation_devices
        if schedule is Schedule.ASYNC_RL:
            return pipeline_s(generate_s, 0.0, training_s + other_s)
        return min(
            pipeline_s(
                generate_s,
                sync.reference_s * setting.devices / apart,
                other_s + (sync.update_s + sync.old_logprobs_s) * setting.devices / (left - apart),
            )
            for apart in range(1, left)
        )

    def ours(self, generation_devices: int) -> tuple[float, float]:
        """Seconds per step of ours, and the share of groups past its bound."""
        bound = self.setting.bound
        settings = replace(
            self._settings(generation_devices, num_steps=self._scale.num_steps(bound)),
            max_staleness_steps=bound,
            staleness_policy="wait",
            stream_mini_batch=True,
        )
        ran = simulate(self._trained(settings, *self._split_training_s(generation_devices, has_old_logprobs=False)))
        return ran.mean_step_s * self._unit_s, ran.over_share

    def generation_s(self, devices: int) -> list[float]:
        """Seconds in which so many devices generate each of some batches, one after the other."""
        ran = simulate(self._settings(devices))
        return [seconds * self._unit_s for seconds in ran.generate_s]

    @property
    def splits(self) -> list[int]:
        """Devices that generate while others train: as published, or those worth a try."""
        setting = self.setting
        if setting.generation_devices is not None:
            return [setting.generation_devices]
        engine = setting.devices_per_engine * self._cut
        return sorted(
            {devices for quarters in (1, 2, 3) if (devices := setting.devices * quarters // 4 // engine * engine)}
        )

    def _partial_s(self) -> float:
        """Engines are full while they generate: the time in which they finish a batch, then everything else, in turns."""
        bound, sync = 8, self.setting.synchronous  # the bound holds nothing back: a batch is in flight, no more
        settings = replace(
            self._settings(self.setting.devices, num_steps=self._scale.num_steps(bound)),
            max_staleness_steps=bound,
            staleness_policy="allow",
            oldest_weight=1.0,
            num_workers=self.setting.groups // self._cut,
        )
        ran = simulate(settings, is_in_arrival_order=True)
        return ran.mean_step_s * self._unit_s + self._training_s + sync.switch_s + sync.other_s

    def _streamed_s(self, generation_devices: int) -> float:
        """The capacity rule alone; a threshold below 1 is counted in parts of a batch."""
        setting = self.setting
        parts, bound, is_streamed = 1, setting.bound, setting.schedule is Schedule.FULLY_ASYNC
        if is_streamed and setting.staleness_threshold < 1:
            parts = round(1 / setting.staleness_threshold)
            bound = round(setting.staleness_threshold * parts) + parts - 1
        groups = setting.groups // self._cut
        settings = replace(
            self._settings(generation_devices, num_steps=self._scale.num_steps(bound) * parts),
            mini_batch_size=groups // parts,
            max_staleness_steps=bound,
            staleness_policy="allow",
            oldest_weight=1.0,
            stream_mini_batch=is_streamed,
        )
        training_s, other_s = self._split_training_s(generation_devices, has_old_logprobs=False)
        ran = simulate(self._trained(settings, training_s, other_s / parts), is_in_arrival_order=True)
        return ran.mean_step_s * parts * self._unit_s

    def _split_training_s(self, generation_devices: int, *, has_old_logprobs: bool) -> tuple[float, float]:
        """Of the devices that do not generate, and what is the same on any number."""
        setting = self.setting
        if setting.is_balanced:
            return self._training_s, 0.0
        left = setting.devices - generation_devices
        return setting.training_s(left, has_old_logprobs=has_old_logprobs), setting.synchronous.other_s

    @property
    def _sync_devices(self) -> int:
        setting = self.setting
        return setting.generation_devices or setting.devices if setting.is_balanced else setting.devices

    def _num_engines(self, devices: int) -> int:
        return devices // self.setting.devices_per_engine // self._cut

    def _settings(self, devices: int, *, num_steps: int | None = None, seed: int | None = None) -> SimulationSettings:
        """Whole batches, each generated before it is trained; training takes no time."""
        setting = self.setting
        return replace(
            WHOLE_BATCHES,
            mini_batch_size=setting.groups // self._cut,
            group_size=setting.group_size,
            num_steps=num_steps or self._scale.sync_steps,
            num_engines=self._num_engines(devices),
            half_speed_requests=setting.half_speed_requests,
            sigma=setting.sigma,
            longest_over_mean=setting.longest_over_mean,
            seed=self._seed if seed is None else seed,
        )

    def _trained(self, settings: SimulationSettings, training_s: float, other_s: float) -> SimulationSettings:
        """With training that takes so many real seconds a batch."""
        return replace(
            settings,
            seconds_per_token=training_s / self._unit_s / self._tokens,
            step_seconds=other_s / self._unit_s,
        )


def _cut(setting: Setting, max_answers: int) -> int:
    """By which groups and engines are divided: a power of two that divides all of them."""
    cut, generators = 1, setting.generation_devices or setting.devices // 4
    together = (setting.groups, setting.num_engines, generators // setting.devices_per_engine)
    while setting.groups * setting.group_size > max_answers * cut and not any(n % (2 * cut) for n in together):
        cut *= 2
    return cut


def one_step_off_s(generate_s: Sequence[float], training_s: float) -> float:
    """Seconds per step where a batch is generated while the one before it is trained, and both wait for each other."""
    return fmean(max(seconds, training_s) for seconds in generate_s)


def pipeline_s(generate_s: Sequence[float], reference_s: float, training_s: float, *, ahead: int = 1) -> float:
    """Seconds per step of whole batches through generation, reference log-probs and training, each on devices of its own.

    Batch k is begun when the weights of step ``k - ahead - 1`` are there. The first third of the steps fill the pipeline.
    """
    generated = referenced = 0.0
    trained: list[float] = []
    for step, seconds in enumerate(generate_s):
        allowed = trained[step - ahead - 1] if step > ahead else 0.0
        generated = max(generated, allowed) + seconds
        referenced = max(referenced, generated) + reference_s
        trained.append(max(referenced, trained[-1] if trained else 0.0) + training_s)
    first = len(trained) // 3
    return (trained[-1] - trained[first]) / (len(trained) - 1 - first)


def swept_s(sweep: Sweep, scale: Scale, seed: int) -> dict[tuple[int, int], float]:
    """Seconds per step of each published run of a sweep, from that at S = 0 with one engine. Whole mini-batches are trained."""
    at_0 = replace(
        WHOLE_BATCHES,
        mini_batch_size=sweep.groups,
        group_size=sweep.group_size,
        num_steps=scale.sync_steps,
        num_engines=1,
        half_speed_requests=sweep.half_speed_requests,
        sigma=sweep.sigma,
        longest_over_mean=sweep.longest_over_mean,
        seed=seed + CALIBRATION_SEED,
    )
    drawn = simulate(at_0)
    rest_s = sweep.step_s[0, 1] - sweep.other_s[0]
    training_s = sweep.training_share * rest_s
    unit_s = (rest_s - training_s) / fmean(drawn.generate_s)
    found = {}
    for bound, num_engines in sweep.step_s:
        settings = replace(
            at_0,
            max_staleness_steps=bound,
            num_engines=num_engines,
            num_steps=scale.num_steps(bound) if bound else scale.sync_steps,
            num_workers=sweep.num_workers if bound else None,
            seconds_per_token=training_s / unit_s / drawn.tokens,
            seed=seed,
        )
        found[bound, num_engines] = simulate(settings).mean_step_s * unit_s + sweep.other_s[bound]
    return found
