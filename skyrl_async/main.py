"""``python -m skyrl_async.main key=value ...``: one run, from its command line to its summary.

Flows in: overrides. Flows out: a run directory, a summary on standard output, an exit code: 0 done, 1 failed, 2 a wrong command
line, 130 interrupted. Knows what a run leaves behind, and nothing of how it is put together.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from skyrl_async.checkpoint import Checkpointer, read_state
from skyrl_async.composition.parts import LogGroups
from skyrl_async.composition.processes import write_private
from skyrl_async.composition.run import started_parts, trainer_of
from skyrl_async.concurrency import first_failure
from skyrl_async.config.load import run_cli, to_yaml, without_secrets
from skyrl_async.config.schema import Config, ResumeMode
from skyrl_async.config.wheel_tag import correct_wheel_tag
from skyrl_async.errors import ConfigError, SkyRLAsyncError
from skyrl_async.metrics.console import Console
from skyrl_async.metrics.logs import run_logging
from skyrl_async.metrics.summary import summary_table, write_summary
from skyrl_async.metrics.trace import Trace, free_trace_path
from skyrl_async.metrics.tracker import MetricsLog, Sink, Tracker
from skyrl_async.metrics.trained_groups import TrainedGroupsLog
from skyrl_async.metrics.wandb import WandbSink
from skyrl_async.trainer import FullyAsyncTrainer

logger = logging.getLogger(__name__)

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run; returns the exit code."""
    correct_wheel_tag()
    return run_cli(run, argv)


def run(config: Config, overrides: list[str]) -> int:
    """One run in its directory; an expected error is one line, an unexpected one its traceback."""
    started = time.monotonic()
    try:
        run_dir = _run_directory(config)
        checkpoint = _checkpoint_to_resume(config, run_dir)
    except SkyRLAsyncError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    with run_logging(run_dir / "run.log", config.logging.level):
        logger.info("overrides: %s", " ".join(overrides))
        write_private(run_dir / "config.yaml", to_yaml(config))
        try:
            asyncio.run(_run(config, run_dir, checkpoint, started))
        except (KeyboardInterrupt, asyncio.CancelledError):
            sys.stderr.write(f"interrupted; continue with trainer.resume_mode=latest trainer.output_dir={run_dir}\n")
            return _INTERRUPTED
        except BaseExceptionGroup as failures:
            return _fail(first_failure(failures), run_dir)
        except Exception as error:
            return _fail(error, run_dir)
    return 0


def _fail(error: BaseException, run_dir: Path) -> int:
    """Log the whole traceback; show it too unless the error explains itself."""
    logger.error("the run failed", exc_info=error)
    if isinstance(error, SkyRLAsyncError):
        sys.stderr.write(f"error: {error}\n(see {run_dir / 'run.log'})\n")
        return 1
    raise error from None


async def _run(config: Config, run_dir: Path, checkpoint: Path | None, started: float) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    resume_step = read_state(checkpoint).step if checkpoint else None
    with ExitStack() as stack:
        console = stack.enter_context(Console(config.logging.console, config.trainer.num_steps))
        tracker = stack.enter_context(Tracker(_sinks(config, run_dir, resume_step, console)))
        trace_path = free_trace_path(run_dir) if config.logging.trace else None
        trace = stack.enter_context(Trace(trace_path, time.monotonic))
        console.message(f"run directory: {run_dir}")

        def log(step: int, values: dict[str, float]) -> None:
            tracker.log(step, {"trainer/step": float(step), **values})

        log_groups = _trained_groups_log(config, run_dir, resume_step, stack)
        starting = started_parts(
            config, run_dir, trace=trace, say=console.phase, announce=console.message, checkpoint=checkpoint
        )
        async with starting as parts:
            trainer = trainer_of(
                config,
                parts,
                run_dir=run_dir,
                log=log,
                log_groups=log_groups,
                trace=trace,
                show_stuck=console.stuck,
            )
            if parts.endpoint_url is not None:
                console.message(f"endpoint: {parts.endpoint_url} (key in {run_dir / 'endpoint.json'})")
            if checkpoint is not None:
                console.phase(f"resuming {checkpoint.name}")
                await trainer.resume(checkpoint)
            booted = time.monotonic()
            console.phase("training")
            await trainer.run()
            if config.trainer.export_hf:
                console.phase("exporting the policy")
                await parts.policy.export_hf(run_dir / "policy")
    summary = _summary(trainer, run_dir, started, booted, config.trainer.export_hf)
    write_summary(run_dir / "summary.json", summary)
    console.summary(summary_table(summary))


def _sinks(config: Config, run_dir: Path, resume_step: int | None, console: Console) -> list[Sink]:
    sinks: list[Sink] = [MetricsLog(run_dir / "metrics.jsonl", resume_step), console]
    if config.logging.tensorboard:
        from skyrl_async.metrics.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(run_dir / "tensorboard", resume_step))
    if config.logging.wandb:
        sinks.append(WandbSink(run_dir, config.logging.wandb_project, without_secrets(config)))
    return sinks


def _trained_groups_log(config: Config, run_dir: Path, resume_step: int | None, stack: ExitStack) -> LogGroups:
    if not config.logging.trained_groups:
        return lambda version, groups: None
    path = run_dir / "trained_groups.jsonl"
    groups_log = TrainedGroupsLog(path, resume_step, has_tokens=config.logging.trained_tokens)
    stack.callback(groups_log.close)
    return groups_log.log


def _summary(
    trainer: FullyAsyncTrainer, run_dir: Path, started: float, booted: float, has_policy: bool
) -> dict[str, Any]:
    from skyrl_async.metrics.curves import draw_curves

    now = time.monotonic()
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
        "steps": trainer.step,
        "seconds": now - started,
        "boot_seconds": booted - started,
        **trainer.totals.summary(),
        **{name: str(path) for name, path in files.items() if path is not None},
    }


def _run_directory(config: Config) -> Path:
    """Make the run's directory. Raises ``ConfigError`` when another run is in it that is not to be continued."""
    if config.trainer.output_dir is None:
        name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{config.task.name}_{os.getpid()}"
        directory = Path("outputs") / name
    else:
        directory = Path(config.trainer.output_dir).expanduser()
    if config.trainer.resume_mode is ResumeMode.none and (directory / "metrics.jsonl").exists():
        raise ConfigError(
            f"trainer.output_dir={directory} already holds a run; choose another, or continue it with trainer.resume_mode=latest"
        )
    directory.mkdir(parents=True, exist_ok=True)
    return directory.absolute()


def _checkpoint_to_resume(config: Config, run_dir: Path) -> Path | None:
    if config.trainer.resume_mode is ResumeMode.none:
        return None
    if config.trainer.resume_mode is ResumeMode.latest:
        return Checkpointer(run_dir / "checkpoints", max_to_keep=0).latest()
    assert config.trainer.resume_path is not None
    path = Path(config.trainer.resume_path).expanduser()
    read_state(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
