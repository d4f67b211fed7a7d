"""The real loop in virtual time over a run's model, once as the run was and once for each what-if."""

import asyncio
import contextlib
import gc
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from multiprocessing import get_context
from statistics import fmean, stdev
from typing import Any

import numpy as np

from skyrl_async.config.load import changed, value_of
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.trainer import BOUND_NAMES, WORKERS_NAMES, StalenessPolicy
from skyrl_async.plan.measured import Measured, samples_per_step
from skyrl_async.plan.model import Model, fit, settings_of, stage_seconds
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import KnownGroup, ModelledPolicy
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Group

_FORECAST_ERROR = 0.1
"""Root mean square of what forecasts of a run with other settings were off by, relative to the step (``benchmarks.plan_accuracy``)."""
_BOUND = f"trainer.{BOUND_NAMES[0]}"
_POLICY = "trainer.staleness_policy"
_NUM_REPLICATES = 4
_MOST_SAMPLES = 8_000
"""Most samples of the steps that are measured, but for ``_LEAST_STEPS``: more steps of a large run would say little more."""
_LARGE_STEP = 2_000
"""Samples of a step from which on two replicates do."""
_LEAST_STEPS, _MOST_STEPS = 4, 25
"""Fewest and most steps that a replicate measures, a hundred in all; the last wave is measured whole."""
_PUBLISH_WAIT = "timing/wait_for_publish"
_WAITS = ("timing/wait_for_groups", "timing/wait_for_devices", _PUBLISH_WAIT)
_ENGINE_SECONDS = ("idle_seconds", "request_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What is asked."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key of the configuration -> value."""
    lengths: float = 1.0
    """Factor of every reply's tokens."""


def config_of(config: Config, what_if: WhatIf) -> Config:
    """The configuration that is asked about; a bound or a number of workers replaces one under another of its names, and a window's size
    is of the policy ``window`` alone."""
    asked = [others for first, *others in (BOUND_NAMES, WORKERS_NAMES) if f"trainer.{first}" in what_if.keys]
    others = dict.fromkeys(f"trainer.{name}" for names in asked for name in names)
    if what_if.keys.get(_POLICY, StalenessPolicy.window) is not StalenessPolicy.window:
        others["trainer.staleness_window_groups"] = None
    return changed(config, {**others, **what_if.keys})


def simplified(config: Config, what_if: WhatIf) -> WhatIf:
    """The same without what is so already."""
    known = {key: config.trainer.staleness_bound if key == _BOUND else value_of(config, key) for key in what_if.keys}
    return replace(what_if, keys={key: value for key, value in what_if.keys.items() if known[key] != value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the loop does in virtual time: means over replicates, each of which draws the measured steps and groups anew."""

    step_seconds: float
    """Per optimizer step, of which a batch may have several."""
    spread_seconds: float
    """Two standard deviations of the replicates, and what the model of the run itself is off by."""
    low_seconds: float
    high_seconds: float
    """``spread_seconds``, and twice what forecasts of runs were off by, around ``step_seconds``."""
    trainer_idle_frac: float
    """Share of a step in which the trainer waits for groups, for a weight update, or for devices that it shares."""
    publish_wait_frac: float
    """The part of it that is for a weight update."""
    engines_idle_frac: float
    """Share of the time in which an engine has no request."""
    requests_per_engine: float
    """Running, in the mean."""
    staleness_mean: float
    tokens_per_second: float
    """Trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How well the model reproduces the run itself."""

    measured_seconds: float
    """Mean seconds per optimizer step, the first steps left out."""
    forecast: Forecast

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.forecast.step_seconds / self.measured_seconds - 1


class Planner:
    """Forecasts for one run or described cluster.

    Args:
        source: a measured run, or a model that somebody described.
        num_processes: simulations at a time.
        seed: of everything that is drawn.
    """

    def __init__(self, source: Measured | Model, *, num_processes: int, seed: int = 0) -> None:
        self._models = _models(source, seed)
        self._num_processes = num_processes
        self.accuracy: Accuracy | None = None
        """None for a described cluster."""
        self._measured = None
        if isinstance(source, Measured):
            self._measured = source.mean("timing/step") / source.config.trainer.steps_per_batch

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return self._models[0].config

    @property
    def groups(self) -> tuple[KnownGroup, ...]:
        """The groups that prompts get."""
        return self._models[0].groups

    def forecasts(
        self, what_ifs: Sequence[WhatIf], on_progress: Callable[[int, int], object] = lambda done, of: None
    ) -> list[Forecast]:
        """One forecast for each, equal ones simulated once; also makes ``accuracy``. ``on_progress`` gets (simulations done, of all)."""
        asked = [simplified(self.config, one) for one in what_ifs]
        unique: list[WhatIf] = [WhatIf()]
        unique += [one for number, one in enumerate(asked) if one not in (WhatIf(), *asked[:number])]
        settings, stages = [], []
        for what_if in unique:
            for number, model in enumerate(self._models):
                config = config_of(model.config, what_if)
                settings.append(replace(settings_of(model, config, lengths=what_if.lengths), seed=number))
                stages.append(stage_seconds(model, config, what_if.lengths))
        found = self._simulate(settings, stages, on_progress)
        num = len(self._models)
        replicates = [found[i : i + num] for i in range(0, len(found), num)]
        if self._measured is not None:
            self.accuracy = Accuracy(measured_seconds=self._measured, forecast=_joined(replicates[0], 0.0, 0.0))
        errors = (0.0, 0.0) if self.accuracy is None else (abs(self.accuracy.error), 2 * _FORECAST_ERROR)
        return [_joined(replicates[unique.index(one)], *errors) for one in asked]

    def _simulate(
        self,
        settings: Sequence[SimulationSettings],
        stages: Sequence[Mapping[str, float]],
        on_progress: Callable[[int, int], object],
    ) -> "list[_Simulated]":
        found = list[_Simulated]()
        with contextlib.ExitStack() as stack:
            results: Iterable[_Simulated] = map(_simulated, stages, settings)
            if self._num_processes > 1:
                pool = ProcessPoolExecutor(
                    self._num_processes, mp_context=get_context("spawn"), initializer=prepare_process
                )
                results = stack.enter_context(pool).map(_simulated, stages, settings)
            for done, one in enumerate(results, 1):
                found.append(one)
                on_progress(done, len(settings))
        return found


def prepare_process() -> None:
    """In a process that simulates: modelled failures are not reported, and garbage is looked for between simulations only.

    In 90,000 answers, 800 MB, 2,000 objects were garbage; looking for it took a fifth of the time.
    """
    logging.disable(logging.ERROR)
    gc.disable()


def _models(source: Measured | Model, seed: int) -> list[Model]:
    """As many models as replicates; the first of a run is of its steps and groups as they are."""
    num = 2 if samples_per_step(source.config) > _LARGE_STEP else _NUM_REPLICATES
    if isinstance(source, Model):
        return [source] * num
    return [fit(source)] + [fit(source, np.random.default_rng([seed, number])) for number in range(1, num)]


@dataclass(frozen=True, slots=True)
class _Simulated:
    step_seconds: float
    trainer_idle_frac: float
    publish_wait_frac: float
    engines_idle_frac: float
    requests_per_engine: float
    staleness_mean: float
    tokens_per_second: float


def _measured_steps(settings: SimulationSettings) -> tuple[int, int]:
    """Steps to leave out, in which the buffer fills, and to measure: whole waves, since a bound makes steps come in waves of S + 1."""
    wave = settings.max_staleness_steps + 1
    num_steps = max(_LEAST_STEPS, min(_MOST_STEPS, _MOST_SAMPLES // (settings.mini_batch_size * settings.group_size)))
    return max(2, wave), math.ceil(num_steps / wave) * wave


def _simulated(stages: Mapping[str, float], settings: SimulationSettings) -> _Simulated:
    """Run the loop until enough steps are measured."""
    num_left_out, num_measured = _measured_steps(settings)

    def works(policy: ModelledPolicy) -> dict[str, Callable[[Group], Any]]:
        return {
            name: partial(_after, policy.compute if name in settings.on_policy_workers else asyncio.sleep, seconds)
            for name, seconds in stages.items()
        }

    async def main() -> tuple[Simulation, int, int, list[float]]:
        running = asyncio.current_task()
        assert running is not None
        noted: dict[int, list[float]] = {}

        def on_step(step: int) -> None:  # of a batch of several steps only the last one is logged
            if len(noted) < 2 and step >= (min(noted) + num_measured if noted else num_left_out):
                noted[step] = [
                    asyncio.get_running_loop().time(),
                    *(sum(getattr(engine, name) for engine in simulation.engines) for name in _ENGINE_SECONDS),
                ]
                if len(noted) == 2:
                    running.cancel()

        simulation = Simulation(settings, prepare_with=works, on_step=on_step)
        with contextlib.suppress(asyncio.CancelledError):
            await simulation.run()
        (first, begun), (last, ended) = noted.items()
        return simulation, first, last, [end - begin for begin, end in zip(begun, ended, strict=True)]

    gc.collect()  # of the simulation before
    simulation, first, last, (lasted, idle, requests) = run_in_virtual_time(main())
    logged = {step: values for step, values in simulation.logged if "timing/step" in values}
    steps = [values for step, values in logged.items() if first < step <= last]  # not what the end has cut short
    seconds = sum(values["timing/step"] for values in steps)
    num_mini_batches = (settings.train_batch_size or settings.mini_batch_size) // settings.mini_batch_size
    return _Simulated(
        step_seconds=seconds / (len(steps) * num_mini_batches * settings.update_epochs_per_batch),
        trainer_idle_frac=sum(values.get(name, 0.0) for values in steps for name in _WAITS) / seconds,
        publish_wait_frac=sum(values.get(_PUBLISH_WAIT, 0.0) for values in steps) / seconds,
        engines_idle_frac=idle / (lasted * settings.num_engines),
        requests_per_engine=requests / (lasted * settings.num_engines),
        staleness_mean=fmean(values["async/staleness_mean"] for values in steps),
        tokens_per_second=sum(values["policy/num_tokens"] for values in steps) / seconds,
    )


async def _after(compute: Callable[[float], Awaitable[object]], seconds: float, group: Group) -> Group:
    await compute(seconds)
    return group


def _joined(replicates: Sequence[_Simulated], model_error: float, forecast_error: float) -> Forecast:
    means = {one.name: fmean(getattr(found, one.name) for found in replicates) for one in fields(_Simulated)}
    seconds = means["step_seconds"]
    spread = math.hypot(2 * stdev(one.step_seconds for one in replicates), model_error * seconds)
    margin = math.hypot(spread, forecast_error * seconds)
    low, high = max(0.0, seconds - margin), seconds + margin
    return Forecast(**means, spread_seconds=spread, low_seconds=low, high_seconds=high)
