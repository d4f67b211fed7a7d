"""Runs of the real loop in virtual time that leave the files of a run: what is planted in them is known exactly."""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_async.config.load import changed, to_yaml
from skyrl_async.metrics.trace import Trace
from skyrl_async.record.files import DIRECTORY
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.rollout.preparation import Prepare
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledPolicy
from skyrl_async.simulator.run import Simulation, SimulationSettings, _config


def recorded(
    settings: SimulationSettings,
    run_dir: Path,
    edit: Callable[[dict[str, Any]], object] = lambda row: None,
    prepare_with: Callable[[ModelledPolicy], Mapping[str, Prepare]] = lambda policy: {},
) -> list[dict[str, float]]:
    """Run ``settings`` and write config.yaml, metrics.jsonl, samples/ and trace/. ``edit`` changes each step's row. Returns the rows."""

    async def main() -> list[dict[str, Any]]:
        trace = Trace(run_dir / "trace", asyncio.get_running_loop().time)
        record = SampleRecord(run_dir / DIRECTORY)
        simulation = Simulation(settings, trace=trace, record=record, prepare_with=prepare_with)
        await simulation.run()
        trace.close()
        record.close()
        rows: dict[int, dict[str, Any]] = {}
        for step, values in simulation.logged:
            rows.setdefault(step, {"step": step}).update(values)
        return list(rows.values())

    run_dir.mkdir(parents=True, exist_ok=True)
    asked: dict[str, Any] = {"engine.max_num_seqs": settings.max_num_seqs or 64}
    if settings.shared_by:
        asked |= {"placement.groups": [list(group) for group in settings.shared_by], "placement.devices": [1]}
        asked["placement.min_generation_slice_s"] = settings.min_generation_slice_s
    asked["generator.on_failed_samples"] = settings.on_failed_samples
    config = changed(_config(settings, 0), asked)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    rows = run_in_virtual_time(main())
    for row in rows:
        edit(row)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows
