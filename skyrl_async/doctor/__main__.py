"""Says why engine and trainer disagree about log-probs, and whether it matters.

uv run -m skyrl_async.doctor outputs/RUN                  every way of computing log-probs, on rows of the run
uv run -m skyrl_async.doctor outputs/RUN --prompts FILE   the same on new answers of an engine, to prompts of a file or of the run ("run")
uv run -m skyrl_async.doctor outputs/RUN --no-engine      without booting an engine
uv run -m skyrl_async.doctor outputs/RUN --json FILE      the figures too
uv run -m skyrl_async.doctor outputs/RUN KEY=VALUE ...    as the run would be with other settings

Exit codes: 0 healthy, 1 something is wrong, 2 the run cannot be examined.
"""

import argparse
import asyncio
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec

from skyrl_async.doctor.examination import Examination, examine
from skyrl_async.doctor.findings import OTHER_WEIGHTS
from skyrl_async.doctor.rows import MAX_TOKENS_PER_ROW
from skyrl_async.errors import ConfigError, SkyRLAsyncError


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="skyrl_async.doctor", description="Says why engine and trainer disagree.")
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run, such as outputs/RUN")
    settings = "settings to replace in the run's configuration, such as policy.dtype=float32"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=settings)
    parser.add_argument("--rows", type=int, default=64, help="rows, or prompts, to examine at most (default: 64)")
    prompts = "sample new answers with the newest weights and examine those: a .jsonl or .parquet file, or 'run' for the run's own prompts"
    parser.add_argument("--prompts", metavar="FILE", help=prompts)
    parser.add_argument("--no-engine", action="store_true", help="boot no engine; judge it by what it has recorded")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    given = parser.parse_intermixed_args(arguments)
    if given.rows < 1:
        parser.error(f"--rows must be at least 1, got {given.rows}")
    if given.prompts is not None and given.no_engine:
        parser.error("--prompts needs an engine to answer them: leave out --no-engine")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        if given.json is not None:
            _check_writable(given.json)
        examining = examine(
            given.run,
            num_rows=given.rows,
            prompts=given.prompts,
            with_engine=not given.no_engine,
            overrides=given.overrides,
            say=_say,
        )
        found = asyncio.run(examining)
        sys.stdout.write(report(found))
        if given.json is not None:
            written = msgspec.json.encode(asdict(found) | {"is_healthy": found.is_healthy})  # NaN is null
            given.json.write_bytes(msgspec.json.format(written))
    except (SkyRLAsyncError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0 if found.is_healthy else 1


def _check_writable(path: Path) -> None:
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"--json {path} cannot be written: {error.strerror}; name a file in a directory that exists"
        ) from None


def _say(line: str) -> None:
    sys.stderr.write(f"{line} ...\n")


def report(found: Examination) -> str:
    """The examination as text."""
    versions = ", ".join(map(str, found.versions))
    rows = "recorded rows" if found.is_recorded else "answers sampled now"
    rows += f" (the first {MAX_TOKENS_PER_ROW:,} response tokens of each)" if found.is_cut else ""
    lines = [
        f"{found.num_tokens:,} tokens of {found.num_rows} {rows}, policy version {versions}",
        "",
        "Nats, compared with transformers, one row at a time, in float32:",
        f"  {'':42} {'tokens':>8} {'mean |gap|':>11} {'mean gap':>11} {'largest':>9}",
    ]
    lines += [
        f"  {path.name:42} {path.num_tokens:8,} {path.mean_abs:11.2e} {path.mean:+11.2e} {path.largest:9.2e}"
        for path in found.paths
    ]
    if (split := found.split) is not None:
        lines += [
            "",
            f"Importance ratios of {split.num_tokens:,} trained tokens, {split.mean_lag:.2g} versions old: mean |log ratio| "
            f"{split.log_ratio:.2e} nats,",
            f"  mismatch between engine and trainer {split.mismatch:.2e}, staleness {split.staleness:.2e}; the mismatch alone moves a "
            f"ratio by {split.ratio_change_by_mismatch:.2%}",
        ]
    lines.append("")
    for finding in found.findings:
        size = "" if math.isnan(finding.mean_abs_gap) else f", mean gap {finding.mean_abs_gap:.2e} nats"
        share = f", explains {finding.explained:.0%} of it" if finding.explained else ""
        lines.append(f"{'WRONG' if finding.is_fault else 'known'}  {finding.kind} ({finding.where}{size}{share})")
        lines.append(f"       {finding.sentence}")
    if found.is_healthy:
        is_unknown = any(finding.kind == OTHER_WEIGHTS for finding in found.findings)
        known = ", as far as it can be judged without the run's weights" if is_unknown else ""
        lines.append(f"healthy: engine and trainer agree up to rounding{known}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # vLLM's libraries would list on standard error what they have leaked
