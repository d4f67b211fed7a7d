"""The ways in which a run computes log-probs, each done again on the same tokens and the same weights.

    trainer    packed, one row at a time, padded
    engine     prefill of tokens, decode of new answers; as booted, and after a publish

Knows neither what a run has recorded about them nor what a difference means.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from skyrl_async.columns import TokenIds, VersionSpans
from skyrl_async.composition.logprobs import forward_settings
from skyrl_async.composition.processes import vllm_config
from skyrl_async.config.schema.run import Config
from skyrl_async.doctor.rows import Row, Tokens
from skyrl_async.doctor.scoring import Scorer, Values
from skyrl_async.errors import ConfigError
from skyrl_async.inference.vllm.engine import VLLMEngine
from skyrl_async.runtime.tasks import run_together
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import EngineRequest, LogprobModel, PauseMode, SamplingParams, Trajectory

BFLOAT16_FACTOR = 4.0
"""A gap within this factor of the one that bfloat16 makes is of its size."""
FLOAT32_ROUNDING = 1e-4
"""Mean gap in nats up to which rounding of float32 explains it; 1e-6 is usual."""
_LAYER_ROUNDING = 1e-4
"""Relative difference of a layer's output up to which rounding of float32 explains it; 1e-6 is usual."""
_NEW_TOKENS = 128
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
    begins: str = ""
    """Where in the model it begins, as far as that was looked for."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How large a gap rounding explains."""

    gap: Values
    """(N,) nats by which computing in bfloat16 changes each token."""
    uses_bfloat16: bool
    """Whether engine or trainer may compute in it."""

    @property
    def bfloat16(self) -> float:
        """Mean gap in nats that computing in bfloat16 makes."""
        return float(np.abs(self.gap).mean())

    @property
    def limit(self) -> float:
        """Mean gap in nats that rounding may make."""
        return max(FLOAT32_ROUNDING, BFLOAT16_FACTOR * self.bfloat16 if self.uses_bfloat16 else 0.0)


def path_gap(name: str, values: Values, model: Values) -> PathGap:
    """Compare tokens that the model knows; a value that is no number makes the gap none."""
    gap = (values - model)[np.isfinite(model)]
    if not len(gap):
        return PathGap(name, 0, np.nan, np.nan, np.nan)
    return PathGap(name, len(gap), float(np.abs(gap).mean()), float(gap.mean()), float(np.abs(gap).max()))


async def trainer_paths(config: Config, directory: Path, tokens: Tokens, model: Values) -> list[PathGap]:
    """The trainer's ways, with weights of ``directory``; ``model``: (N,) log-probs of the tokens by transformers."""
    settings = forward_settings(config, str(directory))
    rows = [row.trajectory for row in tokens.rows]
    found = []
    for is_packed in dict.fromkeys((settings.use_sample_packing, False)):
        ways = {"trainer, packed" if is_packed else "trainer, padded": [rows]}
        if is_packed is settings.use_sample_packing:
            ways["trainer, one row at a time"] = [[row] for row in rows]
        policy = InProcessPolicy(replace(settings, use_sample_packing=is_packed))
        try:
            for name, batches in ways.items():
                computed = [(await policy.logprobs_of(batch, LogprobModel.POLICY)).values for batch in batches]
                values = [of[row.loss_mask] for of, row in zip(sum(computed, ()), rows, strict=True)]
                found.append(path_gap(name, np.concatenate(values).astype(np.float64), model))
        finally:
            await policy.close()
    return found


@contextlib.asynccontextmanager
async def booted_engine(
    config: Config, directory: Path, asked: Sequence[TokenIds], sampling: SamplingParams, work_dir: Path
) -> AsyncIterator["EngineWays"]:
    """An engine with weights of ``directory``. Raises ``EngineStartError``."""
    settings = replace(vllm_config(config, "engine-0", directory), adapter_rank=0)
    with _errors_in(work_dir / "engine.log"):
        engine = await VLLMEngine.start(settings)
    try:
        yield EngineWays(config, engine, asked, sampling, work_dir)
    finally:
        await engine.close()


@contextlib.contextmanager
def _errors_in(path: Path) -> Iterator[None]:
    """What this process, and those it starts, write to standard error goes to a file: vLLM's warnings of the machine.

    It is shown after all if the block fails.
    """
    own = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    except BaseException:
        os.write(own, path.read_bytes())
        raise
    finally:
        os.dup2(own, 2)
        os.close(own)


@dataclass(frozen=True, slots=True)
class EngineWays:
    """An engine, and its ways of computing log-probs."""

    config: Config
    engine: VLLMEngine
    asked: Sequence[TokenIds]
    """Prompts that it answers."""
    sampling: SamplingParams
    """How it samples the answers."""
    work_dir: Path

    async def answers(self, version: int) -> list[Row]:
        """Answers to the prompts, sampled side by side and recorded as of ``version``. Raises ``ConfigError`` if no prompt fits."""
        answers = {}
        for number, prompt in enumerate(self.asked):
            if (room := self.engine.max_model_len - len(prompt)) > 0:
                name = f"version {version}, answer {number}"
                sampling = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, _NEW_TOKENS, room))
                request = EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)
                answers[name] = self._answer(request, version)
        if not answers:
            raise ConfigError(
                f"no prompt is shorter than the {self.engine.max_model_len} tokens of the engine's context"
            )
        return list(await run_together(answers))

    async def _answer(self, request: EngineRequest, version: int) -> Row:
        output = await self.engine.generate(request)
        num = len(output.token_ids)
        trajectory = Trajectory(
            prompt_token_ids=request.prompt_token_ids,
            response_token_ids=output.token_ids,
            loss_mask=np.ones(num, bool),
            logprobs=output.logprobs,
            versions=VersionSpans.constant(version, num),
            reward=0.0,
        )
        return Row.of(self.engine.name, trajectory)

    async def publish(self, directory: Path, version: int) -> None:
        """Bring weights of ``directory`` to the engine, as a run does."""
        policy = InProcessPolicy(forward_settings(self.config, str(directory)))
        try:
            await policy.gather_weights(version)
            update = await policy.send_weights(version, self.work_dir / "published", _BUCKET_BYTES)
        finally:
            await policy.close()
        await self.engine.switch_weights(update, PauseMode.ABORT)
        await self.engine.resume()

    async def measured(
        self, name: str, scorer: Scorer, rows: Sequence[Row], answers: Sequence[Row], rounding: Rounding
    ) -> list[PathGap]:
        """Prefill of ``rows`` and decode of its own ``answers``, under the weights of ``scorer``."""
        own = Tokens.of(answers)
        decoded = path_gap(f"engine, decode, {name}", own.recorded, scorer.scores(own, self.sampling))
        fitting = [row for row in rows if len(row.ids) < self.engine.max_model_len]
        if not fitting:
            return [decoded]
        tokens = Tokens.of(fitting)
        model = scorer.scores(tokens, SamplingParams(max_tokens=1))
        values = [
            (await self.engine.prompt_logprobs(f"{name}, row {number}", row.ids))[row.places - 1]
            for number, row in enumerate(fitting)
        ]
        prefilled = path_gap(f"engine, prefill, {name}", np.concatenate(values).astype(np.float64), model)
        if not prefilled.mean_abs <= rounding.limit:
            gaps = [np.abs(gap).mean() for gap in tokens.by_row(np.concatenate(values) - model)]
            ids = fitting[int(np.argmax(gaps))].ids
            prefilled = replace(prefilled, begins=await self._begins(scorer, ids, rounding.uses_bfloat16))
        return [prefilled, decoded]

    async def _begins(self, scorer: Scorer, ids: TokenIds, uses_bfloat16: bool) -> str:
        """The first layer whose output differs by more than rounding on a row."""
        path = self.work_dir / "layers.safetensors"
        await self.engine.write_layer_outputs("layers", ids, path)
        if not (found := load_file(path)):
            return "add engine.enforce_eager=true to see in which layer it begins"
        own = scorer.layer_outputs(ids)
        rounded = scorer.rounded().layer_outputs(ids) if uses_bfloat16 else own
        before = 0.0
        for name, output in own.items():
            difference = _relative(found[name][: len(ids)], output)
            if not difference <= max(_LAYER_ROUNDING, BFLOAT16_FACTOR * _relative(rounded[name], output)):
                return f"it begins in {name}: its output differs by {difference:.2g} of its size, its input by {before:.2g}"
            before = difference
        return "no layer's output differs: it begins behind them, in the last norm or the output head"


def _relative(found: NDArray[np.float32], output: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(found - output) / np.linalg.norm(output))
