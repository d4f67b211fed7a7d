"""``python -m skyrl_async.main key=value ...``: one run, from its command line to its summary.

Exit codes: 0 done, 1 failed, 2 refused before anything was started, 130 interrupted by Ctrl-C, 143 by SIGTERM. Knows the files of a run,
and nothing of how the run is put together.
"""

import asyncio
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_async.chat.turns import TurnSplitter
from skyrl_async.checkpoint.checkpointer import Usable
from skyrl_async.composition.closing import ClosingStack, leave_process
from skyrl_async.composition.parts import Parts, make_trainer
from skyrl_async.composition.run import started_parts
from skyrl_async.composition.run_directory import RunConfigFile, checkpoint_to_resume, only_run_in, set_aside_records
from skyrl_async.config.command_line import masked, run_cli
from skyrl_async.config.load import without_secrets
from skyrl_async.config.schema.fields import value_text
from skyrl_async.config.schema.run import Config
from skyrl_async.config.wheel_tag import correct_wheel_tag
from skyrl_async.errors import SkyRLAsyncError
from skyrl_async.generators.agent.command import end_agents_of
from skyrl_async.metrics.console import Console
from skyrl_async.metrics.logs import run_logging
from skyrl_async.metrics.summary import summary_table, write_summary
from skyrl_async.metrics.trace import Trace
from skyrl_async.metrics.tracker import (
    MetricsLog,
    Sink,
    Tracker,
    evaluated_steps,
    free_path,
    replace_file,
)
from skyrl_async.record.files import DIRECTORY as SAMPLES
from skyrl_async.record.files import TOKENIZER
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.runtime.daemon_threads import DaemonThreads
from skyrl_async.runtime.garbage import collect_rarely
from skyrl_async.runtime.shutdown import Interruption, Phase
from skyrl_async.runtime.tasks import first_failure
from skyrl_async.trainer.fully_async import FullyAsyncTrainer
from skyrl_async.trainer.run import TrainerCallbacks

logger = logging.getLogger("skyrl_async.main")
_only_in_file = logging.getLogger("run")
"""Not of this package's names, hence never on standard error."""

_REFUSED = 2


def main(argv: Sequence[str] | None = None, *, owns_process: bool = False) -> int:
    """Read the command line and run; returns the exit code.

    A thread may be stuck when everything is over: Ray's, which waits for a frozen process, or one that writes a checkpoint to a disk that
    hangs. An interpreter that ends under Ray's crashes (exit code 139 in place of the run's).

    Args:
        argv: None is the process's own.
        owns_process: whether nothing else is in this process, as with ``python -m skyrl_async.main``: where a thread is stuck, every
            process that this one started is killed then, and this one ended by ``os._exit`` with the exit code, past ``atexit``. Otherwise
            the exit code is returned, and the thread, a daemon, is left to the caller.
    """
    correct_wheel_tag()
    return run_cli(partial(run, owns_process=owns_process), argv)


def run(config: Config, overrides: list[str], *, owns_process: bool = False) -> int:
    """One run in its directory; an expected error is one line, an unexpected one its traceback. ``owns_process``: see ``main``."""
    started = time.monotonic()
    with ExitStack() as stack:
        try:
            run_dir = _run_directory(config)
            stack.enter_context(only_run_in(run_dir))
            resumed = checkpoint_to_resume(config, run_dir)
            set_aside = set_aside_records(config, run_dir, resumed)
            log_path, has_console = run_dir / "run.log", config.logging.console
            stack.enter_context(run_logging(log_path, config.logging.level, has_console=has_console))
            config_file = RunConfigFile(run_dir, config, None if resumed is None else resumed.state.step)
        except (SkyRLAsyncError, OSError) as error:
            found = value_text(config.trainer.output_dir)
            wrong = f"trainer.output_dir must be a directory that can be written to, got {found!r}: "
            sys.stderr.write(f"error: {wrong if isinstance(error, OSError) else ''}{error}\n")
            return _REFUSED
        interruption = stack.enter_context(Interruption(config.trainer.shutdown_timeout_s))
        logger.info("overrides: %s", " ".join(map(masked, overrides)))
        if set_aside is not None:
            logger.warning("%s", set_aside)
        if num_agents := end_agents_of(run_dir):
            logger.warning("%d processes of agents that the run left when it was killed are ended", num_agents)
        if resumed is not None:
            for reason in resumed.refused:
                logger.warning("%s; %s is resumed instead", reason, resumed.path.name)
        if changes := config_file.changes():
            logger.warning("the run goes on with other settings than before: %s", ", ".join(changes))
        one_run = _Run(config, run_dir, config_file, resumed, interruption, started)
        code = one_run.exit_code()
    if owns_process and one_run.has_unfinished_thread:
        leave_process(code)
    return code


class _Stopped(Exception):
    """The run was asked to stop, and has saved what there is."""


@dataclass
class _Run:
    """One run in its directory."""

    config: Config
    """Checked."""
    run_dir: Path
    """Exists, and is locked for this run."""
    config_file: RunConfigFile
    """Written, or replaced after the run was resumed."""
    resumed: Usable | None
    """Checkpoint to go on from; None: the run begins anew."""
    interruption: Interruption
    """Handles signals."""
    started: float
    """Time of the command, of ``time.monotonic``."""
    disk: DaemonThreads = field(default_factory=lambda: DaemonThreads("checkpoint"))
    """Writes checkpoints."""
    _ending: ClosingStack = field(default_factory=ClosingStack)
    _trainer: FullyAsyncTrainer | None = None
    _engines: Callable[[], Mapping[str, Mapping[str, float]]] = dict
    _stalls: Sequence[str] = ()
    _training_began: float = 0.0
    _evaluation_dir: Path | None = None
    """Has the samples of ``trainer.eval_only``, as the directory of a run would."""
    _metrics: MetricsLog = field(init=False)
    _records: list[MetricsLog | SampleRecord] = field(default_factory=list)
    _failures: list[str] = field(default_factory=list)
    """One per thing after training that failed: none of it keeps the rest from being done."""

    @property
    def has_unfinished_thread(self) -> bool:
        """Whether a thread is stuck after the end."""
        return self._ending.threads.is_busy or self.disk.is_busy

    @property
    def _checkpoint(self) -> Path | None:
        return None if self.resumed is None else self.resumed.path

    @property
    def _resume_step(self) -> float | None:
        """Step after which records are written again; an evaluation does no step again."""
        if self.resumed is None:
            return None
        return math.inf if self.config.trainer.eval_only else self.resumed.state.step

    def exit_code(self) -> int:
        """Run to the end, and explain on standard error what that is."""
        try:
            asyncio.run(self.execute())
        except BaseException as end:
            error = first_failure(end)
        else:
            if self._trainer is not None and (failure := self._trainer.checkpoint_failure):
                self._failures.insert(0, str(failure))
            for reason in self._failures:
                sys.stderr.write(f"error: {reason}\n")
            return 1 if self._failures else 0
        if (cause := self.interruption.shutdown.failure) is not None:
            return self._report_failure(cause)
        is_cancelled = isinstance(error, asyncio.CancelledError) and self.interruption.signal is not None
        if is_cancelled or isinstance(error, KeyboardInterrupt | _Stopped):
            return self._report_interruption(is_saved=isinstance(error, _Stopped))
        return self._report_failure(error)

    def _report_failure(self, error: BaseException) -> int:
        """Log the error with all that led to it. Show one line, or a traceback where it does not explain itself, then the last
        checkpoint.
        """
        _only_in_file.error("the run failed", exc_info=error)
        if isinstance(error, SkyRLAsyncError):
            sys.stderr.write(f"error: {error}\n")
        else:
            traceback.print_exception(error, chain=False)
        if self._trainer is not None:
            sys.stderr.write(f"{self._last_checkpoint}\n")
        sys.stderr.write(f"(see {self.run_dir / 'run.log'})\n")
        return 1

    def _report_interruption(self, *, is_saved: bool) -> int:
        """Say what is saved and how the run goes on; return the exit code."""
        trainer, code = self._trainer, self.interruption.exit_code
        saved = trainer.newest_checkpoint if trainer is not None else None
        said = f"ended at once, {self._last_checkpoint}"
        if trainer is not None and is_saved:
            if trainer.checkpoint_failure is not None:
                said = f"error: step {trainer.trained_version} is not saved: {trainer.checkpoint_failure}"
                code = 1
            elif saved is not None:
                said = f"stopped after step {trainer.trained_version}, saved in {saved}"
        sys.stderr.write(
            f"{said}\ninterrupted; continue with --config {self.run_dir / 'config.yaml'} trainer.output_dir={self.run_dir} "
            "trainer.resume_mode=latest\n"
        )
        return code

    @property
    def _last_checkpoint(self) -> str:
        saved = (self._trainer.newest_checkpoint if self._trainer is not None else None) or self._checkpoint
        return f"the last checkpoint is {saved}" if saved else "nothing is saved"

    async def execute(self) -> None:
        """Start all parts, train or evaluate, end all parts, and write the summary."""
        config, shutdown = self.config, self.interruption.shutdown
        with ExitStack() as stack:
            stack.enter_context(self.interruption.attached())
            console = stack.enter_context(Console(config.logging.console, config.trainer.num_steps))
            tracker = stack.enter_context(closing(Tracker([*self._sinks(), console])))
            trace_dir = self.run_dir / "trace" if config.logging.trace else None
            max_bytes = round(config.logging.trace_max_gb * 1e9)
            trace = stack.enter_context(closing(Trace(trace_dir, time.monotonic, max_bytes)))
            console.message(f"run directory: {self.run_dir}")
            async with started_parts(
                config,
                self.run_dir,
                trace=trace,
                say=console.phase,
                announce=console.message,
                checkpoint=self._checkpoint,
                stack=self._ending,
                shutdown=shutdown,
            ) as parts:
                callbacks = self._callbacks(tracker, console, parts, stack)
                trainer = self._trainer = make_trainer(
                    config,
                    parts,
                    checkpoint_dir=self.run_dir / "checkpoints",
                    callbacks=callbacks,
                    trace=trace,
                    shutdown=shutdown,
                    disk=self.disk,
                )
                self._engines = parts.engines
                console.watch(trainer.stages, trainer.failure_reasons, self._engines)
                collect_rarely()
                with self.interruption.ending_afterwards():
                    await self._train(trainer, parts, console)
            self._failures += self._ending.failures
            await self._metrics.flush()
            with self._attempt("the summary"):
                self._summarize(trainer, parts, console)

    def _sinks(self) -> list[Sink]:
        config, run_dir = self.config, self.run_dir
        self._metrics = MetricsLog(run_dir / "metrics.jsonl", self._resume_step, notes=self._notes)
        self._records.append(self._metrics)
        sinks: list[Sink] = [self._metrics]
        if config.logging.tensorboard:
            from skyrl_async.metrics.sinks import TensorBoardSink

            sinks.append(TensorBoardSink(run_dir / "tensorboard", self._resume_step))
        if config.logging.wandb:
            from skyrl_async.metrics.sinks import WandbSink

            sinks.append(WandbSink(run_dir, config.logging.wandb_project, without_secrets(config)))
        return sinks

    def _notes(self) -> dict[str, Any]:
        """What belongs to a line of ``metrics.jsonl`` and is no number."""
        if self._trainer is None:
            return {}
        stages = {stage.name: stage.where for stage in self._trainer.stages()}
        return {"stages": stages, "engines": self._engines()} | ({"stuck": list(self._stalls)} if self._stalls else {})

    def _callbacks(self, tracker: Tracker, console: Console, parts: Parts, stack: ExitStack) -> TrainerCallbacks:
        def log(step: int, values: dict[str, float]) -> None:
            tracker.log(step, {"trainer/step": float(step), **values})

        def show_stalls(lines: Sequence[str]) -> None:
            self._stalls = lines
            console.stuck(lines)

        samples, directory = self.config.trainer.samples, self.run_dir
        if self.config.trainer.eval_only:
            directory = self._evaluation_dir = free_path(directory / "evaluation")
            directory.mkdir()
        if parts.renderer and not (directory / TOKENIZER).exists():
            replace_file(directory / TOKENIZER, parts.renderer.tokenizer.backend_tokenizer.to_str())
        record = SampleRecord(
            directory / SAMPLES,
            turns_of=TurnSplitter(parts.renderer).turns if parts.renderer else None,
            groups_with_text=samples.groups_with_text,
            max_bytes=samples.max_gb * 1e9,
        )
        self._records.append(record)
        stack.callback(record.close)
        return TrainerCallbacks(log=log, flush_log=self._metrics.flush, show_stalls=show_stalls, record=record)

    async def _train(self, trainer: FullyAsyncTrainer, parts: Parts, console: Console) -> None:
        """Train to the end, and export the policy. Raises ``_Stopped`` when a stop was asked for before that end."""
        if parts.endpoint_url is not None:
            console.message(f"endpoint: {parts.endpoint_url} (key in {self.run_dir / 'endpoint.json'})")
        if self._checkpoint is not None:
            console.phase(f"resuming {self._checkpoint.name}")
            evaluated = evaluated_steps(self.run_dir / "metrics.jsonl")
            await trainer.resume(self._checkpoint, evaluated_versions=evaluated)
            self.config_file.replace()
        for record in reversed(
            self._records
        ):  # samples first: where metrics begin anew, the page drops the rows that it has
            record.begin()
            await record.flush()
        self._training_began = time.monotonic()
        console.phase("evaluating" if self.config.trainer.eval_only else "training")
        self.interruption.enter(Phase.TRAINING)
        await trainer.run()
        if self.interruption.shutdown.is_requested and not trainer.is_complete:
            raise _Stopped
        self.interruption.enter(Phase.FINISHING)
        if trainer.evaluation_failure is not None:
            self._failures.append(f"the last evaluation failed: {trainer.evaluation_failure}")
        if self._exports_policy:
            console.phase("exporting the policy")
            with self._attempt("the export of the policy"):
                await parts.policy.export_hf(self.run_dir / "policy")

    @property
    def _exports_policy(self) -> bool:
        return self.config.trainer.export_hf and not self.config.trainer.eval_only

    @contextmanager
    def _attempt(self, what: str) -> Iterator[None]:
        """Go on after a failure inside."""
        try:
            yield
        except Exception as error:
            _only_in_file.error("%s failed", what, exc_info=error)
            self._failures.append(f"{what} failed: {type(error).__name__}: {error}")

    def _summarize(self, trainer: FullyAsyncTrainer, parts: Parts, console: Console) -> None:
        """Write and show the summary of a run; of an evaluation, what it found, in a file of its own."""
        run_dir, now = self.run_dir, time.monotonic()
        summary: dict[str, Any] = {
            "steps": trainer.served_version,
            "seconds": now - self.started,
            "boot_seconds": self._training_began - self.started,
            "run_directory": run_dir,
        }
        if self.config.trainer.eval_only:
            path = free_path(run_dir / "evaluation.json")
            result = trainer.first_evaluation
            summary |= {} if result is None else result.values()
            summary |= {"checkpoint": self._checkpoint, "evaluation": path, "samples": self._evaluation_dir}
        else:
            from skyrl_async.metrics.curves import draw_curves

            path, metrics, curves = (run_dir / name for name in ("summary.json", "metrics.jsonl", "curves.png"))
            with self._attempt("the drawing of curves"):
                draw_curves(metrics, curves)
            summary |= {
                "reward_before": trainer.totals.reward_before,
                "reward_after": trainer.reward_after,
                "throughput_beside_validation": trainer.throughput_beside_validation,
                **trainer.totals.summary(),
                "curves": curves,
                "metrics": metrics,
            }
        if self._exports_policy:
            summary["policy"] = run_dir / "policy"
        for name, workers in (("policy", parts.policy), ("critic", parts.critic)):
            if workers is not None and workers.num_restarts:
                summary[f"{name}_restarts"] = workers.num_restarts
        console.summary(summary_table(summary))
        write_summary(path, summary)


def _run_directory(config: Config) -> Path:
    """Make the run's directory."""
    name, given = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{config.task.name}_{os.getpid()}", config.trainer.output_dir
    directory = Path("outputs", name) if given is None else Path(given).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    return directory.absolute()


if __name__ == "__main__":
    sys.exit(main(owns_process=True))
