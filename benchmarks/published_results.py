"""Published figures of asynchronous training, beside what their schedules and ours reach in one model, in virtual time.

Each setting is made from its *synchronous* row alone. One run of the real loop at ``max_staleness_steps=0`` says how long a batch
takes to generate in virtual seconds, and the row how long in real ones; that fixes the scale, and nothing is fitted to an
asynchronous row. Then the same lengths are drawn, the devices are split, and the batch goes through the other system's schedule
(``modelled``) and through ours: fully asynchronous, streamed, ``staleness_policy=wait`` at the bound that is printed (``ours``).

What the model assumes of every setting is ``ASSUMPTIONS``, which is printed, and with each setting what is assumed of it alone and which
phases of its synchronous row fall away.

``sweeps`` are runs of one system over its staleness bound, or with more engines: each is predicted from the one at S = 0, as whole batches
through our loop with ``wait``.

``scaling`` is of no published setting: the synchronous schedule and ours on 8 to 1,024 devices, half of which generate in ours. On 8
devices training takes as long as full engines take to generate a batch. ``sensitivity`` changes one assumption of a row.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks.published_model import (
    CALIBRATION_SEED,
    FULL,
    MEAN_TOKENS,
    QUICK,
    WHOLE_BATCHES,
    Model,
    Scale,
    simulate,
    swept_s,
)
from benchmarks.published_settings import SETTINGS, SWEEPS, Schedule, Setting, Sweep
from benchmarks.report import arguments, conditions, report

SYNC_TOLERANCE = 0.05
"""By how much a synchronous step of the model may miss the published one: other lengths are drawn than those that fix the scale."""

ASSUMPTIONS = (
    "each request runs at 1 / (1 + n / half) of full speed with n running in its engine, whose memory holds all of them",
    "lengths are lognormal, and cut at a multiple of their mean",
    "training takes time in proportion to tokens and inversely to devices, unless the source has a synchronous row for as many; the "
    "phases of a row that are neither generation, update nor log-probs take the same on any number of devices",
    "publishing, prefill and waiting for tools take no time; kernels, memory, networks, and what colocation costs beyond the phases of "
    "its row are not modelled",
    "a large batch is cut together with its engines, and a token stands for many",
    "how devices are split is as published, or else the fastest of a quarter, half and three quarters for generation; ours splits as "
    "the other system does, and as is fastest beside one whose stages take turns",
)
"""Of every setting."""

_SCALING_DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
_QUICK_SCALING_DEVICES = (8, 64, 1024)
_SCALING_BOUND = 4


def assumed_of(setting: Setting) -> dict[str, str]:
    """What the model assumes of one setting, in words, besides ``ASSUMPTIONS``."""
    cut = f"half = {setting.half_speed_requests:.0f}, sigma {setting.sigma:g}, longest answer {setting.longest_over_mean:g} times the mean"
    return {
        "assumed": f"{cut}; {setting.assumed}" if setting.assumed else cut,
        "phases that fall away in modelled": ", ".join(setting.phases_gone(is_ours=False)) or "none",
        "phases that fall away in ours": ", ".join(setting.phases_gone(is_ours=True)) or "none",
    }


def measure(setting: Setting, scale: Scale, seed: int) -> dict[str, Any]:
    """Model one setting; its row."""
    started, model = time.process_time(), Model(setting, scale, seed)
    sync_s, splits = model.synchronous_s(), model.splits
    is_shared = setting.schedule is Schedule.PARTIAL
    modelled_s, split = min((model.modelled_s(devices), devices) for devices in (splits[:1] if is_shared else splits))
    (ours_s, over_share), ours_split = min(
        (model.ours(devices), devices) for devices in (splits if is_shared else [split])
    )
    return {
        "system": setting.system,
        "setting": setting.setting,
        "published_speedup": setting.published_speedup,
        "published_total_speedup": setting.published_total_speedup,
        "modelled_speedup": sync_s / modelled_s,
        "ours_speedup": sync_s / ours_s,
        "bound": setting.bound,
        "generating": f"{ours_split}/{setting.devices}",
        "sync_step_s": setting.synchronous.step_s,
        "sync_error": sync_s / setting.synchronous.step_s - 1,
        "modelled_step_s": modelled_s,
        "ours_step_s": ours_s,
        "ours_over_share": over_share,
        "cpu_s": time.process_time() - started,
    }


def measure_sweep(sweep: Sweep, scale: Scale, seed: int) -> dict[str, Any]:
    """The predictions of one sweep, in ``runs``."""
    started = time.process_time()
    predicted = swept_s(sweep, scale, seed)
    runs = [
        {
            "system": sweep.system,
            "setting": sweep.setting,
            "bound": bound,
            "engines": engines,
            "published_step_s": seconds,
            "predicted_step_s": predicted[bound, engines],
            "error": predicted[bound, engines] / seconds - 1,
        }
        for (bound, engines), seconds in sweep.step_s.items()
    ]
    return {"setting": sweep.setting, "runs": runs, "cpu_s": time.process_time() - started}


def measure_scaling(devices: int, is_batch_fixed: bool, scale: Scale, seed: int) -> dict[str, Any]:
    """The synchronous schedule and ours on so many devices, one engine each; virtual seconds."""
    bound, half = _SCALING_BOUND, 170.0
    on_8 = scale.max_answers // (1 if is_batch_fixed else 16)
    answers = on_8 if is_batch_fixed else on_8 * devices // 8
    generate_s = on_8 * MEAN_TOKENS / 8 * (1 / half + 8 / on_8)
    sync = replace(
        WHOLE_BATCHES,
        mini_batch_size=answers // 4,
        group_size=4,
        num_steps=scale.sync_steps // 2,
        num_prompts=8192,
        num_engines=devices,
        half_speed_requests=half,
        seconds_per_token=generate_s / (on_8 * MEAN_TOKENS) * 8 / devices,
        seed=seed,
    )
    ours = replace(
        sync,
        max_staleness_steps=bound,
        num_steps=scale.num_steps(bound),
        num_engines=devices // 2,
        seconds_per_token=2 * sync.seconds_per_token,
        stream_mini_batch=True,
    )
    ran_sync, ran_ours = simulate(sync), simulate(ours)
    return {
        "batch": "fixed" if is_batch_fixed else "grows",
        "devices": devices,
        "answers": answers,
        "sync_step_s": ran_sync.mean_step_s,
        "ours_step_s": ran_ours.mean_step_s,
        "speedup": ran_sync.mean_step_s / ran_ours.mean_step_s,
        "over_share": ran_ours.over_share,
        "virtual_s": ran_sync.total_s + ran_ours.total_s,
        "cpu_s": ran_sync.cpu_s + ran_ours.cpu_s,
    }


def with_linearity(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers per second and device over those on the fewest devices with the same kind of batch."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row["batch"], row)

    def per_device(row: dict[str, Any], name: str) -> float:
        return float(row["answers"] / row[name] / row["devices"])

    return [
        row
        | {
            f"{who}_linearity": per_device(row, f"{who}_step_s") / per_device(first[row["batch"]], f"{who}_step_s")
            for who in ("sync", "ours")
        }
        for row in rows
    ]


def sensitivity() -> list[tuple[str, Setting]]:
    """What a row says if an assumption of it is another."""
    verl = next(s for s in SETTINGS if s.schedule is Schedule.FULLY_ASYNC and s.devices == 128)
    async_rl = next(s for s in SETTINGS if s.schedule is Schedule.ASYNC_RL and s.devices == 32)
    half = verl.half_speed_requests
    return [
        ("a short tail, sigma 0.5", replace(verl, sigma=0.5)),
        ("a long tail, sigma 1.2", replace(verl, sigma=1.2)),
        ("half speed at half as many", replace(verl, half_speed_requests=half / 2)),
        ("half speed at twice as many", replace(verl, half_speed_requests=half * 2)),
        (
            "phases of verl's 7B row",
            replace(async_rl, synchronous=verl.synchronous.of_length(async_rl.synchronous.step_s)),
        ),
    ]


def results(scale: Scale, seed: int, num_processes: int, *, is_quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Every row: of the settings, of what their assumptions matter, of 8 to 1,024 devices."""
    variants = [] if is_quick else sensitivity()
    devices = _QUICK_SCALING_DEVICES if is_quick else _SCALING_DEVICES
    calls: list[tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]] = [
        *((measure, (setting, scale, seed)) for setting in (*SETTINGS, *(variant for _, variant in variants))),
        *((measure_scaling, (num, is_fixed, scale, seed)) for is_fixed in (True, False) for num in devices),
        *((measure_sweep, (sweep, scale, seed)) for sweep in SWEEPS),
    ]
    if num_processes == 1:
        rows = [function(*given) for function, given in calls]
    else:
        with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = [pool.submit(function, *given) for function, given in calls]
            rows = []
            for future in futures:
                rows.append(future.result())
                print(f"[{len(rows)}/{len(calls)}] {rows[-1].get('setting', 'scaling')}", flush=True)
    num_settings, num_sweeps = len(SETTINGS), len(calls) - len(SWEEPS)
    num_scaling = num_sweeps - len(devices) * 2
    return {
        "rows": rows[:num_settings],
        "sensitivity": [
            {"other": name, **row} for (name, _), row in zip(variants, rows[num_settings:num_scaling], strict=True)
        ],
        "scaling": with_linearity(rows[num_scaling:num_sweeps]),
        "sweeps": rows[num_sweeps:],
    }


def _columns(rows: Sequence[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name.removesuffix("_speedup"): row[name] for name in names} for row in rows]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at once")
    options = parser.parse_args()
    texts = [{"setting": f"{s.system}, {s.setting}", "source": s.source} | assumed_of(s) for s in SETTINGS]
    texts += [{"setting": f"{s.system}, {s.setting}", "source": s.source, "assumed": s.assumed} for s in SWEEPS]
    seeds = [options.seed, options.seed + CALIBRATION_SEED]
    under = conditions(
        seeds=seeds, is_quick=options.quick, sync_tolerance=SYNC_TOLERANCE, settings=texts, assumptions=ASSUMPTIONS
    )
    scale = QUICK if options.quick else FULL
    measured = results(scale, options.seed, options.processes, is_quick=options.quick)
    print("assumed of every setting", *ASSUMPTIONS, sep="\n  ")
    for text in texts:
        print("\n  ".join([text["setting"], *(f"{name}: {said}" for name, said in text.items() if name != "setting")]))
    report("8 to 1,024 devices, virtual seconds", {}, measured["scaling"], None)
    speedups = ("published_speedup", "published_total_speedup", "modelled_speedup", "ours_speedup")
    runs = [run for sweep in measured["sweeps"] for run in sweep["runs"]]
    report("runs over the staleness bound, predicted from the first of each", {}, runs, None)
    report("if an assumption is another", {}, _columns(measured["sensitivity"], "other", "setting", *speedups), None)
    rows = measured["rows"]
    figures = {
        "sync_error_max": max(abs(row["sync_error"]) for row in rows),
        "over_share_max": max(row["ours_over_share"] for row in rows),
        "cpu_s": sum(row["cpu_s"] for name in measured for row in measured[name]),
        "conditions": under,
    }
    shown = _columns(rows, "system", "setting", *speedups, "bound", "generating", "sync_error")
    report("published results: speed-ups over the synchronous row", figures, shown, options.json, written=measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
