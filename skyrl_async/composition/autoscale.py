"""Adds or removes an engine of a run where its own plan says that it gains.

    every autoscale_interval_s: newest steps ──skyrl_async.plan, a process of its own──> step seconds with n - 1, n, n + 1 engines
                                                        ──rule, twice the same──> Fleet.add_engine or remove_engine

The rule adds an engine for a gain that is larger than the plan's error, and removes one that nobody would miss. What it takes to add one
is far more than what it takes to keep one, and a wish must come twice, so that it does not go to and fro. An engine that was added and
removed had been promised too much of: each time, twice as many plans in a row must wish for it. The staleness bound holds with any number
of engines.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_async.config.schema.engine import Autoscale, EngineConfig
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError, SkyRLAsyncError
from skyrl_async.inference.engine_life import EngineState
from skyrl_async.inference.fleet import Fleet
from skyrl_async.runtime.tasks import task_group

logger = logging.getLogger(__name__)

ADD_GAIN = 0.1
"""Least gain in speed for which an engine is added."""
KEEP_GAIN = 0.02
"""Least loss of speed for which one is kept."""
_NICENESS = 10

Steps = Mapping[int, tuple[float, float]]
"""Engines -> seconds of a step, and by how much they may be wrong."""
Plan = Callable[[Path, list[int]], Awaitable[Steps]]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the rule would do, and why."""

    change: int
    """+1, -1 or 0 engines."""
    reason: str


def wish(steps: Steps, num_engines: int) -> Wish:
    """Apply the rule; numbers of engines that are not allowed are missing in ``steps``."""
    now, error = steps[num_engines]
    if num_engines + 1 in steps:
        more, more_error = steps[num_engines + 1]
        gain, doubt = now / more - 1, max(error, more_error) / more
        if gain >= max(ADD_GAIN, doubt):
            return Wish(
                1,
                f"with {num_engines + 1} engines a step would take {more:.3g} s, not {now:.3g} (known to {doubt:.0%})",
            )
    if num_engines - 1 in steps:
        fewer = steps[num_engines - 1][0]
        if fewer <= now * (1 + KEEP_GAIN):
            return Wish(-1, f"with {num_engines - 1} a step would take {fewer:.3g} s, not {now:.3g}")
    return Wish(0, f"{num_engines} are neither too few nor too many")


@contextlib.asynccontextmanager
async def autoscaled(run_dir: Path, fleet: Fleet | None, config: Config) -> AsyncIterator[None]:
    """Follow the rule while the block runs, if ``engine.autoscale`` says so."""
    if fleet is None or config.engine.autoscale is Autoscale.none:
        yield
        return
    plan = partial(planned, num_groups=config.trainer.max_concurrent_generation_groups(config.num_group_places))
    async with task_group() as tasks:
        following = tasks.create_task(follow(run_dir, fleet, config.engine, plan), name="autoscale")
        try:
            yield
        finally:
            following.cancel()


async def follow(run_dir: Path, fleet: Fleet, config: EngineConfig, plan: Plan) -> None:
    """Follow the rule for ever. What fails is logged, and tried again at the next interval."""
    wished, num_same = (0, 0), 0
    """(change, engines) of the plan before, and how many in a row wished it."""
    added, num_undone = set[int](), Counter[int]()
    """Numbers of engines the last of which was added here; and how often it was then removed here. One that died is no mistake."""
    while True:
        await asyncio.sleep(config.autoscale_interval_s)
        before, wished = wished, (0, 0)
        num_engines = _num_settled(fleet)
        if num_engines is None:
            logger.info("engine.autoscale: nothing is planned while an engine starts or leaves")
            continue
        asked = [num_engines]
        if num_engines > (config.min_engines or 1):
            asked.insert(0, num_engines - 1)
        if num_engines < (config.max_engines or config.num_engines):
            asked.append(num_engines + 1)
        try:
            steps = await _planned_without_refused(plan, run_dir, asked, num_engines)
            if _num_settled(fleet) != num_engines:
                continue  # one died meanwhile, or somebody else adds or removes one
            found = wish(steps, num_engines)
            num_same = 1 + (num_same if before == (found.change, num_engines) else 0)
            num_needed = 2 << num_undone[num_engines + 1] if found.change > 0 else 2
            if found.change != 0 and num_same >= num_needed:
                logger.warning(
                    "engine.autoscale: %s, as %d plans in a row have said; %s",
                    found.reason,
                    num_same,
                    _words(found.change),
                )
                await _change(fleet, found.change)
                if found.change > 0:
                    added.add(num_engines + 1)
                elif num_engines in added:
                    added.remove(num_engines)
                    num_undone[num_engines] += 1
            else:
                wished = found.change, num_engines
                logger.info("engine.autoscale: %s", found.reason)
        except SkyRLAsyncError as error:
            logger.info("engine.autoscale: nothing is changed: %s", error)
        except Exception:
            logger.exception("engine.autoscale: nothing is changed")


async def _planned_without_refused(plan: Plan, run_dir: Path, numbers: list[int], num_engines: int) -> Steps:
    """Plan, without one engine more where that is refused: the memory, say, holds no more."""
    try:
        return await plan(run_dir, numbers)
    except ConfigError as error:
        if numbers[-1] == num_engines:
            raise
        steps = await plan(run_dir, numbers[:-1])
        logger.info("engine.autoscale: %d engines are left out of the plan: %s", numbers[-1], error)
        return steps


def _num_settled(fleet: Fleet) -> int | None:
    """Engines, all of which serve; None while there is none, or one starts or leaves. A place that was given up does not count."""
    places = [row for row in fleet.rows() if row["state"] != EngineState.given_up.value]
    return len(places) or None if all(row["serving"] for row in places) else None


def _words(change: int) -> str:
    return "one is added" if change > 0 else "one is removed"


async def _change(fleet: Fleet, change: int) -> None:
    if change > 0:
        await fleet.add_engine()
        return
    *_, newest = (row["name"] for row in fleet.rows() if row["serving"])
    await fleet.remove_engine(newest)


async def planned(run_dir: Path, numbers: list[int], *, num_groups: int) -> Steps:
    """Ask ``skyrl_async.plan`` in a process of little priority. Raises ``ConfigError`` where the run is too young, or cannot be planned.

    ``num_groups``: groups in flight, which stay what they are when engines come and go.
    """
    command = (sys.executable, "-m", "skyrl_async.plan", str(run_dir), "--engines", ",".join(map(str, numbers)))
    process = await asyncio.create_subprocess_exec(
        *command,
        "--json",
        "--processes=1",
        f"--generation-workers={num_groups}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ConfigError(errors.decode(errors="replace").strip() or f"the plan ended with {process.returncode}")
    rows: list[dict[str, Any]] = json.loads(output)["rows"]
    # An engine more or less is no other kind of run: what forecasts of those were off by is left out.
    return {
        row["keys"]["engine.num_engines"]: (row["step_seconds"], row["spread_seconds"]) for row in rows if row["keys"]
    }
