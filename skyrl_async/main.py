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
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_async.checkpoint.checkpointer import Usable
from skyrl_async.composition.closing import ClosingStack, leave_process
from skyrl_async.composition.interruption import Interruption, Phase
from skyrl_async.composition.parts import Parts, make_trainer
from skyrl_async.composition.run import started_parts
from skyrl_async.composition.run_directory import RunConfigFile, checkpoint_to_resume, only_run_in, set_aside_records
from skyrl_async.config.help import value_text
from skyrl_async.config.load import run_cli, without_secrets
from skyrl_async.config.schema.run import Config
from skyrl_async.config.wheel_tag import correct_wheel_tag
from skyrl_async.errors import SkyRLAsyncError
from skyrl_async.generators.agent.command import end_agents_of
from skyrl_async.metrics.console import Console
from skyrl_async.metrics.logs import run_logging
from skyrl_async.metrics.summary import summary_table, write_summary
from skyrl_async.metrics.trace import Trace
from skyrl_async.metrics.tracker import MetricsLog, Sink, Tracker, TrainedGroupsLog, evaluated_steps, free_path
from skyrl_async.runtime.daemon_threads import DaemonThreads
from skyrl_async.runtime.tasks import first_failure
from skyrl_async.trainer.fully_async import FullyAsyncTrainer
from skyrl_async.trainer.run import LogGroups, TrainerCallbacks
from skyrl_async.weight_sync.publisher import Lag

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
            found = checkpoint_to_resume(config, run_dir)
            set_aside = set_aside_records(config, run_dir, found)
            log_path, has_console = run_dir / "run.log", config.logging.console
            stack.enter_context(run_logging(log_path, config.logging.level, has_console=has_console))
            kept = RunConfigFile(run_dir, config, found.state.step if found is not None else None)
        except SkyRLAsyncError as error:
            sys.stderr.write(f"error: {error}\n")
            return _REFUSED
        except OSError as error:
            found_dir = value_text(config.trainer.output_dir)
            sys.stderr.write(
                f"error: trainer.output_dir must be a directory that can be written to, got {found_dir!r}: {error}\n"
            )
            return _REFUSED
        interruption = stack.enter_context(Interruption(config.trainer.shutdown_timeout_s))
        logger.info("overrides: %s", " ".join(overrides))
        if set_aside is not None:
            logger.warning("%s", set_aside)
        if num_left := end_agents_of(run_dir):
            logger.warning("%d processes of agents that the run had left behind when it was killed are ended", num_left)
        for reason in found.refused if found is not None else ():
            logger.warning("%s; %s is resumed instead", reason, found.path.name if found else None)
        if changes := kept.changes():
            logger.warning("the run goes on with other settings than before: %s", ", ".join(changes))
        left = _Left(run_dir, kept)
        code = _exit_code(_run(config, found, started, interruption, left), interruption, left)
    if owns_process and (left.ending.has_unfinished_thread or left.disk.is_busy):
        leave_process(code)
    return code


def _exit_code(running: Coroutine[Any, Any, None], interruption: Interruption, left: "_Left") -> int:
    """Run to the end, and explain on standard error what that is."""
    try:
        asyncio.run(running)
    except BaseExceptionGroup as failures:
        error = first_failure(failures)
    except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as end:
        error = end
    else:
        return left.exit_code()
    if (failure := interruption.shutdown.failure) is not None:
        return _fail(failure, left.run_dir)
    is_cancelled = isinstance(error, asyncio.CancelledError) and interruption.signal is not None
    if is_cancelled or isinstance(error, KeyboardInterrupt | _Stopped):
        return _last_words(interruption, left, is_saved=isinstance(error, _Stopped))
    return _fail(error, left.run_dir)


class _Stopped(Exception):
    """The run was asked to stop, and has saved what there is."""


@dataclass(slots=True)
class _Left:
    """What a run leaves, complete or not."""

    run_dir: Path
    config_file: RunConfigFile
    ending: ClosingStack = field(default_factory=ClosingStack)
    disk: DaemonThreads = field(default_factory=lambda: DaemonThreads("checkpoint"))
    """Writes checkpoints."""
    trainer: FullyAsyncTrainer | None = None
    lags: Callable[[], Mapping[str, Lag]] = dict
    """Of the engines, by name."""
    stuck: Sequence[str] = ()
    """A line for each thing that takes too long."""
    begin_records: list[Callable[[], None]] = field(default_factory=list)
    """Forget what was written of steps that the run now does again."""
    failures: list[str] = field(default_factory=list)
    """Of what comes after training: none of it keeps the rest from being done."""

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Go on after a failure inside."""
        try:
            yield
        except Exception as error:
            _only_in_file.error("%s failed", what, exc_info=error)
            self.failures.append(f"{what} failed: {type(error).__name__}: {error}")

    def notes(self) -> dict[str, Any]:
        """What is no number and belongs to a line of ``metrics.jsonl``."""
        if self.trainer is None:
            return {}
        engines = {
            name: {"lag_steps": lag.steps, "lag_seconds": round(lag.seconds, 3)} for name, lag in self.lags().items()
        }
        stuck = {"stuck": list(self.stuck)} if self.stuck else {}
        return {"stages": {stage.name: stage.where for stage in self.trainer.stages()}, "engines": engines} | stuck

    def exit_code(self) -> int:
        """Of a run that has come to its end; says what is missing."""
        if self.trainer is not None and (failure := self.trainer.checkpoint_failure):
            self.failures.insert(0, str(failure))
        for reason in self.failures:
            sys.stderr.write(f"error: {reason}\n")
        return 1 if self.failures else 0


def _last_words(interruption: Interruption, left: _Left, *, is_saved: bool) -> int:
    """Say what an interrupted run has saved and how it goes on; returns the exit code."""
    trainer, code = left.trainer, interruption.exit_code
    saved = trainer.newest_checkpoint if trainer is not None else None
    if trainer is not None and is_saved and trainer.checkpoint_failure is not None:
        sys.stderr.write(f"error: step {trainer.trained_version} is not saved: {trainer.checkpoint_failure}\n")
        code = 1
    elif trainer is not None and is_saved and saved is not None:
        sys.stderr.write(f"stopped after step {trainer.trained_version}, saved in {saved}\n")
    else:
        sys.stderr.write(f"ended at once, {f'the last checkpoint is {saved}' if saved else 'nothing is saved'}\n")
    sys.stderr.write(
        f"interrupted; continue with --config {left.run_dir / 'config.yaml'} trainer.output_dir={left.run_dir} "
        "trainer.resume_mode=latest\n"
    )
    return code


def _fail(error: BaseException, run_dir: Path) -> int:
    """The error with all that led to it goes to the log; people see one line, or its own traceback if it does not explain itself."""
    _only_in_file.error("the run failed", exc_info=error)
    if isinstance(error, SkyRLAsyncError):
        sys.stderr.write(f"error: {error}\n")
    else:
        traceback.print_exception(error, chain=False)
    sys.stderr.write(f"(see {run_dir / 'run.log'})\n")
    return 1


async def _run(config: Config, found: Usable | None, started: float, interruption: Interruption, left: _Left) -> None:
    run_dir = left.run_dir
    with ExitStack() as stack:
        stack.enter_context(interruption.attached())
        console = stack.enter_context(Console(config.logging.console, config.trainer.num_steps))
        # An evaluation does no step again.
        resume_step = None if found is None else math.inf if config.trainer.eval_only else found.state.step
        tracker = stack.enter_context(Tracker(_sinks(config, left, resume_step, console)))
        trace_path = free_path(run_dir / "trace.json") if config.logging.trace else None
        trace = stack.enter_context(Trace(trace_path, time.monotonic))
        console.message(f"run directory: {run_dir}")

        def log(step: int, values: dict[str, float]) -> None:
            tracker.log(step, {"trainer/step": float(step), **values})

        def show_stalls(lines: Sequence[str]) -> None:
            left.stuck = lines
            console.stuck(lines)

        checkpoint = found.path if found is not None else None
        log_groups = _trained_groups_log(config, left, resume_step, stack)
        parts_of_run = started_parts(
            config,
            run_dir,
            trace=trace,
            say=console.phase,
            announce=console.message,
            checkpoint=checkpoint,
            stack=left.ending,
            shutdown=interruption.shutdown,
        )
        async with parts_of_run as parts:
            trainer = left.trainer = make_trainer(
                config,
                parts,
                run_dir=run_dir,
                callbacks=TrainerCallbacks(log=log, log_groups=log_groups, show_stalls=show_stalls),
                trace=trace,
                shutdown=interruption.shutdown,
                disk=left.disk,
            )
            left.lags = parts.publisher.lags
            console.watch(trainer.stages)
            with interruption.ending_afterwards():
                booted = await _train(trainer, parts, checkpoint, console, interruption, left)
                if config.trainer.export_hf and not config.trainer.eval_only:
                    console.phase("exporting the policy")
                    with left.attempt("the export of the policy"):
                        await parts.policy.export_hf(run_dir / "policy")
        left.failures += left.ending.failures
        with left.attempt("the summary"):
            if config.trainer.eval_only:
                path = free_path(run_dir / "evaluation.json")
                summary = _evaluation(left, checkpoint, started, booted) | {"evaluation": str(path)}
            else:
                summary, path = _summary(left, started, booted, config.trainer.export_hf), run_dir / "summary.json"
            if parts.policy.num_restarts:
                summary["policy_restarts"] = parts.policy.num_restarts
            console.summary(summary_table(summary))
            write_summary(path, summary)


async def _train(
    trainer: FullyAsyncTrainer,
    parts: Parts,
    checkpoint: Path | None,
    console: Console,
    interruption: Interruption,
    left: _Left,
) -> float:
    """Train to the end; returns when training began (seconds). Raises ``_Stopped`` when a stop was asked for before that end."""
    if parts.endpoint_url is not None:
        console.message(f"endpoint: {parts.endpoint_url} (key in {left.run_dir / 'endpoint.json'})")
    if checkpoint is not None:
        console.phase(f"resuming {checkpoint.name}")
        await trainer.resume(checkpoint, evaluated_versions=evaluated_steps(left.run_dir / "metrics.jsonl"))
        left.config_file.replace()
    for begin in left.begin_records:
        begin()
    booted = time.monotonic()
    console.phase("training")
    interruption.enter(Phase.TRAINING)
    await trainer.run()
    if interruption.shutdown.is_requested and not trainer.is_complete:
        raise _Stopped
    interruption.enter(Phase.FINISHING)
    if trainer.evaluation_failure is not None:
        left.failures.append(f"the last evaluation failed: {trainer.evaluation_failure}")
    return booted


def _sinks(config: Config, left: _Left, resume_step: float | None, console: Console) -> list[Sink]:
    run_dir = left.run_dir
    metrics = MetricsLog(run_dir / "metrics.jsonl", resume_step, notes=left.notes)
    left.begin_records.append(metrics.begin)
    sinks: list[Sink] = [metrics, console]
    if config.logging.tensorboard:
        from skyrl_async.metrics.sinks import TensorBoardSink

        sinks.append(TensorBoardSink(run_dir / "tensorboard", resume_step))
    if config.logging.wandb:
        from skyrl_async.metrics.sinks import WandbSink

        sinks.append(WandbSink(run_dir, config.logging.wandb_project, without_secrets(config)))
    return sinks


def _trained_groups_log(config: Config, left: _Left, resume_step: float | None, stack: ExitStack) -> LogGroups:
    if not config.logging.trained_groups:
        return lambda version, groups: None
    path = left.run_dir / "trained_groups.jsonl"
    groups_log = TrainedGroupsLog(path, resume_step, has_tokens=config.logging.trained_tokens)
    left.begin_records.append(groups_log.begin)
    stack.callback(groups_log.close)
    return groups_log.log


def _evaluation(left: _Left, checkpoint: Path | None, started: float, booted: float) -> dict[str, Any]:
    """Of a run that trains nothing: what it leaves beside the record of the one that did, which stays as it is."""
    assert left.trainer is not None
    result = left.trainer.first_evaluation
    return {
        "steps": left.trainer.served_version,
        **({} if result is None else result.values()),
        "seconds": time.monotonic() - started,
        "boot_seconds": booted - started,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "run_directory": str(left.run_dir),
    }


def _summary(left: _Left, started: float, booted: float, has_policy: bool) -> dict[str, Any]:
    from skyrl_async.metrics.curves import draw_curves

    now, trainer, run_dir = time.monotonic(), left.trainer, left.run_dir
    assert trainer is not None
    with left.attempt("the drawing of curves"):
        draw_curves(run_dir / "metrics.jsonl", run_dir / "curves.png")
    files = {
        "run_directory": run_dir,
        "curves": run_dir / "curves.png",
        "metrics": run_dir / "metrics.jsonl",
        "policy": run_dir / "policy" if has_policy else None,
    }
    return {
        "reward_before": trainer.totals.reward_before,
        "reward_after": trainer.reward_after,
        "throughput_beside_validation": trainer.throughput_beside_validation,
        "steps": trainer.served_version,
        "seconds": now - started,
        "boot_seconds": booted - started,
        **trainer.totals.summary(),
        **{name: str(path) for name, path in files.items() if path is not None},
    }


def _run_directory(config: Config) -> Path:
    """Make the run's directory."""
    if config.trainer.output_dir is None:
        name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{config.task.name}_{os.getpid()}"
        directory = Path("outputs") / name
    else:
        directory = Path(config.trainer.output_dir).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    return directory.absolute()


if __name__ == "__main__":
    sys.exit(main(owns_process=True))
