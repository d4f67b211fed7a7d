"""The ways in which a run computes log-probs, each done again on the same tokens and the same weights.

    trainer    packed, one row at a time, padded
    engine     prefill of recorded tokens, decode of new answers to recorded prompts; before and after a publish

Knows neither what a run has recorded about them nor what a difference means.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from skyrl_async.composition.logprobs import forward_settings
from skyrl_async.composition.processes import vllm_config
from skyrl_async.config.schema.run import Config
from skyrl_async.doctor.explanations import Values
from skyrl_async.doctor.rows import Row
from skyrl_async.doctor.scoring import Scorer
from skyrl_async.inference.vllm.engine import VLLMEngine
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import EngineRequest, LogprobModel, PauseMode, SamplingParams

_NEW_ANSWERS, _NEW_TOKENS = 16, 128
_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PathGap:
    """How far one way of computing log-probs is from transformers, in nats over tokens."""

    name: str
    num_tokens: int
    mean_abs: float
    mean: float
    largest: float
    """Largest absolute difference."""


def path_gap(name: str, values: Values, model: Values) -> PathGap:
    """Compare tokens known on both sides."""
    gap = (values - model)[~np.isnan(values) & ~np.isnan(model)]
    if not len(gap):
        return PathGap(name, 0, np.nan, np.nan, np.nan)
    return PathGap(name, len(gap), float(np.abs(gap).mean()), float(gap.mean()), float(np.abs(gap).max()))


async def trainer_paths(config: Config, directory: Path, rows: Sequence[Row], model: Values) -> list[PathGap]:
    """The trainer's ways, with weights of ``directory``; ``model``: (N,) log-probs of the rows' sampled tokens by transformers."""
    found = []
    settings = forward_settings(config, str(directory))
    for name, is_packed, is_alone in (
        ("trainer, packed", True, False),
        ("trainer, one row at a time", settings.use_sample_packing, True),
        ("trainer, padded", False, False),
    ):
        policy = InProcessPolicy(replace(settings, use_sample_packing=is_packed))
        try:
            batches = [[row] for row in rows] if is_alone else [list(rows)]
            values = []
            for batch in batches:
                trajectories = [row.trajectory for row in batch]
                computed = await policy.logprobs_of(trajectories, LogprobModel.POLICY)
                values += [of[row.loss_mask] for of, row in zip(computed.values, trajectories, strict=True)]
        finally:
            await policy.close()
        found.append(path_gap(name, np.concatenate(values).astype(np.float64), model))
    return found


async def engine_paths(
    config: Config, directory: Path, other: Path, rows: Sequence[Row], scorer: Scorer, work_dir: Path
) -> list[PathGap]:
    """An engine's ways: with weights of ``directory`` as booted, and as published to an engine that booted with ``other``.

    Raises ``EngineStartError``.
    """
    found = []
    for name, booted in (("booted with the weights", directory), ("after a publish", other)):
        with _errors_in(work_dir / "engine.log"):
            engine = await VLLMEngine.start(replace(vllm_config(config, "engine-0", booted), adapter_rank=0))
        try:
            if booted is not directory:
                await _publish(config, directory, engine, work_dir)
            found += await _measured(name, engine, config.generator.sampling.temperature, rows, scorer)
        finally:
            await engine.close()
    return found


@contextlib.contextmanager
def _errors_in(path: Path) -> Iterator[None]:
    """What this process, and those it starts, write to standard error goes to a file: vLLM's warnings of the machine."""
    own = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


async def _publish(config: Config, directory: Path, engine: VLLMEngine, work_dir: Path) -> None:
    policy = InProcessPolicy(forward_settings(config, str(directory)))
    try:
        await policy.gather_weights(1)
        update = await policy.send_weights(1, work_dir / "published", _BUCKET_BYTES)
    finally:
        await policy.close()
    await engine.switch_weights(update, PauseMode.ABORT)
    await engine.resume()


async def _measured(
    name: str, engine: VLLMEngine, temperature: float, rows: Sequence[Row], scorer: Scorer
) -> list[PathGap]:
    plain = SamplingParams(max_tokens=1)
    prefilled, by_transformers = [], []
    fitting = [row for row in rows if len(row.ids) < engine.max_model_len]
    for number, row in enumerate(fitting):
        computed = await engine.prompt_logprobs(f"prefill-{number}", row.ids)
        prefilled.append(computed[row.places - 1].astype(np.float64))
        by_transformers.append(scorer.logprobs(row.ids, row.places, [plain])[0])
    decoded, of_decoded = [], []
    for number, row in enumerate(fitting[:_NEW_ANSWERS]):
        prompt = row.trajectory.prompt_token_ids
        longest = min(_NEW_TOKENS, engine.max_model_len - len(prompt))
        sampling = SamplingParams(max_tokens=longest, temperature=temperature)
        request = EngineRequest(request_id=f"decode-{number}", prompt_token_ids=prompt, sampling=sampling)
        output = await engine.generate(request)
        ids = np.concatenate([prompt, output.token_ids])
        decoded.append(output.logprobs.astype(np.float64))
        of_decoded.append(scorer.logprobs(ids, np.arange(len(prompt), len(ids)), [sampling])[0])
    return [
        path_gap(f"engine, prefill, {name}", _joined(prefilled), _joined(by_transformers)),
        path_gap(f"engine, decode, {name}", _joined(decoded), _joined(of_decoded)),
    ]


def _joined(parts: Sequence[Values]) -> Values:
    return np.concatenate([np.empty(0), *parts])
