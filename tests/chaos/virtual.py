"""The same in virtual time: the real loop, fleet, checkpoints and audit over modelled engines, under tens of thousands of faults.

Flows in: faults, and how long to go on after each. Flows out: the files of a run, for the audit. No processes: a fault is a call.
"""

import asyncio
import contextlib
import random
import signal
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from skyrl_async.checkpoint.checkpointer import Checkpointer
from skyrl_async.config.schema.engine import EngineConfig
from skyrl_async.config.schema.generator import OnFailedSamples
from skyrl_async.errors import EnvironmentFailedError, PublishError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.fleet import Fleet
from skyrl_async.record.files import DIRECTORY
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.runtime.shutdown import GRACE_S, Interruption, Phase
from skyrl_async.simulator.clock import VirtualTimeLoop
from skyrl_async.simulator.faults import FaultyEngine
from skyrl_async.simulator.models import ModelledEngine, ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings, lognormal_length
from skyrl_async.trainer.fully_async import FullyAsyncTrainer
from skyrl_async.types import Trajectory
from tests.chaos.audit import Audit, audit

_NUM_CHECKPOINTS = 3
_BOOT_SECONDS = 10.0
_SHUTDOWN_TIMEOUTS_S = (2.0, 20.0, 60.0)
"""Half of each is for what a step lacks: next to nothing, less than an engine takes to boot, more than that."""
_SECOND_CTRL_C_S = 0.5
_FROZEN_ENGINE_S = 2 * GRACE_S
"""A publish that is cut off has engines go back, and then sample again, each of which one that is frozen is waited for so long."""
_ENGINES = EngineConfig(
    heartbeat_interval_s=2.0,
    heartbeat_timeout_s=6.0,
    max_restarts=1 << 30,
    restart_backoff_s=0.5,
    no_engine_timeout_s=1e6,
)
SETTINGS = SimulationSettings(
    mini_batch_size=3,
    group_size=2,
    max_staleness_steps=2,
    num_steps=None,
    num_prompts=16,
    num_engines=3,
    mean_tokens=150.0,
    block_tokens=64,
    seconds_per_token=0.0005,
    step_seconds=0.2,
    load_seconds=0.1,
    send_seconds=0.1,
    max_publish_retries=10,
    engine_wait_s=None,
    checkpoint_interval_steps=2,
    rollout_timeout_s=60.0,
    max_retries=1000,
    max_failed_fraction=1.0,
    on_failed_samples=OnFailedSamples.fill,
    retry_backoff_s=0.5,
    max_retry_backoff_s=5.0,
    sample_full_batch=True,
)


class VirtualFault(StrEnum):
    """What can happen."""

    kill_engine = "an engine is killed"
    freeze_engine = "an engine is frozen"
    refuse_load = "an engine refuses the next weights"
    die_in_load = "an engine dies while it loads the next weights"
    fail_sample = "a sample fails"
    hang_sample = "a sample hangs"
    lose_environment = "an agent's environment is lost"
    fill_disk = "the disk is full until something else happens"
    kill_trainer = "the trainer is killed and resumed"
    interrupt = "Ctrl-C: the trainer ends, and is resumed"
    interrupt_twice = "Ctrl-C twice: the trainer ends at once, and is resumed"


INTERRUPTS = (VirtualFault.interrupt, VirtualFault.interrupt_twice)


class _UnluckyGenerator(ModelledGenerator):
    """Does to the next samples what it is told to; rewards of every fourth admission do not differ."""

    def __init__(self, sampler: InferenceEngineClient) -> None:
        super().__init__(sampler)
        self.fates: list[VirtualFault] = []

    async def _one(self, request: GroupRequest, index: int, seed: int) -> Trajectory:
        fate = self.fates.pop() if self.fates else None
        if fate is VirtualFault.hang_sample:
            await asyncio.Event().wait()
        if fate is VirtualFault.lose_environment:
            raise EnvironmentFailedError("the machine was lost")
        trajectory = await super()._one(request, index, seed)
        if fate is VirtualFault.fail_sample:
            raise RuntimeError("the environment broke at the end")
        return replace(trajectory, reward=1.0) if request.priority % 4 == 0 else trajectory


class VirtualRun:
    """A run on a virtual clock of its own, which stands still between calls.

    Args:
        directory: an empty one.
        settings: of the run; its seed is also that of the choice of engines.
    """

    def __init__(self, directory: Path, settings: SimulationSettings = SETTINGS) -> None:
        self._settings = settings
        self._run_dir = directory
        self._checkpoints = directory / "checkpoints"
        self._rng = random.Random(settings.seed)
        self._runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self._engines: dict[str, FaultyEngine] = {}
        self._models: dict[str, ModelledEngine] = {}
        self._simulation: Simulation
        self._generator: _UnluckyGenerator
        self._record: SampleRecord
        self._interruption: Interruption
        self._shutdown_timeout_s: float
        self._life: asyncio.Task[None]
        self.num_interrupted = 0
        """Times that Ctrl-C was pressed, once or twice."""
        self.num_saved = 0
        """Times that the run ended upon that with a checkpoint of its last step; at other times the one before stays the newest."""
        self._runner.run(self._start())

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return self._simulation.trainer.served_version

    def go_on(self, seconds: float) -> None:
        """Let virtual time pass. Raises what ended the run."""

        async def wait() -> None:
            done, _ = await asyncio.wait({self._life}, timeout=seconds)
            if done:
                self._life.result()
                raise AssertionError("a run without an end has ended")

        self._runner.run(wait())

    def happen(self, fault: VirtualFault) -> None:
        """Let something happen now."""
        self._runner.run(self._happen(fault))

    async def _happen(self, fault: VirtualFault) -> None:
        if fault not in INTERRUPTS:
            self.repair_disk()
        match fault:
            case VirtualFault.kill_engine:
                self._some_engine().kill()
            case VirtualFault.freeze_engine:
                self._some_engine().freeze()
            case VirtualFault.refuse_load:
                self._models[self._some_engine().name].fails_next_load = PublishError
            case VirtualFault.die_in_load:
                self._models[self._some_engine().name].fails_next_load = RuntimeError
            case VirtualFault.fail_sample | VirtualFault.hang_sample | VirtualFault.lose_environment:
                self._generator.fates.append(fault)
            case VirtualFault.fill_disk:
                self._fill_disk()
            case VirtualFault.kill_trainer:
                await self._kill()
                await self._start()
            case VirtualFault.interrupt | VirtualFault.interrupt_twice:
                await self._interrupt(is_twice=fault is VirtualFault.interrupt_twice)
                await self._start()

    def start_over(self) -> None:
        """Take up a run that has ended, or does not get on."""

        async def start_over() -> None:
            with contextlib.suppress(Exception):
                await self._kill()
            await self._start()

        self._runner.run(start_over())

    def repair_disk(self) -> None:
        """It is full no more."""
        self._obstacle.unlink(missing_ok=True)

    def audit(self) -> Audit:
        """Of the files as they are, after one more checkpoint's time."""
        settings = self._settings
        return audit(
            self._run_dir,
            uids={f"p{i}" for i in range(settings.num_prompts)},
            mini_batch_size=settings.mini_batch_size,
            max_staleness_steps=settings.max_staleness_steps + self._simulation.staleness.window_steps,
        )

    def close(self) -> None:
        """End it, whatever has become of it."""
        with contextlib.suppress(Exception):
            self._runner.run(self._kill())
        self._runner.close()

    async def _start(self) -> None:
        usable = Checkpointer(self._checkpoints, max_to_keep=0).usable()
        self._record = SampleRecord(self._run_dir / DIRECTORY)
        self._engines.clear()
        self._models.clear()
        self._shutdown_timeout_s = self._rng.choice(_SHUTDOWN_TIMEOUTS_S)
        self._interruption = Interruption(self._shutdown_timeout_s)
        self._simulation = Simulation(
            self._settings,
            checkpoint_dir=self._checkpoints,
            max_checkpoints_to_keep=_NUM_CHECKPOINTS,
            generator_over=self._new_generator,
            record=self._record,
            shutdown=self._interruption.shutdown,
            engine_around=self._process_of,
        )
        self._life = asyncio.create_task(self._live(usable.path if usable else None), name="life")

    async def _live(self, checkpoint: Path | None) -> None:
        fleet = Fleet(self._simulation.client, start=self._boot, config=_ENGINES, say=lambda line: None)
        with self._interruption.attached():
            async with fleet.supervising():
                with self._interruption.ending_afterwards():
                    if checkpoint is not None:
                        await self._simulation.trainer.resume(checkpoint)
                    self._interruption.enter(Phase.TRAINING)
                    await self._simulation.trainer.run()

    async def _kill(self) -> None:
        """Who is killed writes nothing any more."""
        self._simulation.trainer._saver.checkpointer = None
        with self._record._writer._lock:
            self._record._writer._write = list.clear
        self._life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._life

    async def _interrupt(self, *, is_twice: bool) -> None:
        """Ctrl-C as a process receives it. The run has to end in time and to leave no task; what it was in the midst of may be left."""
        self.num_interrupted += 1
        trainer = self._simulation.trainer
        await asyncio.sleep(0)  # one that was just started is there to be interrupted
        with self._interruption:
            signal.raise_signal(signal.SIGINT)
            if is_twice:
                done, _ = await asyncio.wait({self._life}, timeout=_SECOND_CTRL_C_S)
                if not done:
                    signal.raise_signal(signal.SIGINT)
            await asyncio.wait({self._life}, timeout=self._shutdown_timeout_s + _FROZEN_ENGINE_S)
        assert self._life.done(), (
            f"Ctrl-C has not ended the run in {self._shutdown_timeout_s:g} s and what a frozen engine may take"
        )
        self._record.close()
        if not self._life.cancelled():
            self._life.result()
            self._check_saved(trainer)
        left = [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}]
        assert not left, f"Ctrl-C has left {left}"

    def _check_saved(self, trainer: FullyAsyncTrainer) -> None:
        """A run that has ended by itself has saved its last step, or says why not."""
        if trainer.checkpoint_failure is None:
            saved = trainer.newest_checkpoint.name if trainer.newest_checkpoint else "global_step_0"
            assert saved == f"global_step_{trainer.trained_version}", (
                f"step {trainer.trained_version} ends with {saved}"
            )
            self.num_saved += 1

    def _new_generator(self, client: InferenceEngineClient) -> _UnluckyGenerator:
        self._generator = _UnluckyGenerator(client)
        return self._generator

    def _process_of(self, model: ModelledEngine) -> FaultyEngine:
        self._models[model.name] = model
        self._engines[model.name] = FaultyEngine(model)
        return self._engines[model.name]

    async def _boot(self, name: str) -> FaultyEngine:
        await asyncio.sleep(_BOOT_SECONDS)
        settings = self._settings
        length = lognormal_length(settings.mean_tokens, settings.sigma, settings.seed)
        return self._process_of(
            ModelledEngine(
                name, num_tokens_of=length, load_seconds=settings.load_seconds, block_tokens=settings.block_tokens
            )
        )

    def _some_engine(self) -> FaultyEngine:
        alive = [engine for engine in self._engines.values() if not engine.is_dead]
        return self._rng.choice(alive or list(self._engines.values()))

    @property
    def _obstacle(self) -> Path:
        return self._checkpoints / ".partial-global_step_full"

    def _fill_disk(self) -> None:
        """No checkpoint can be begun: where a directory would be removed is a file."""
        self._checkpoints.mkdir(exist_ok=True)
        self._obstacle.touch()
