"""An engine whose every bit can be reproduced: one request at a time, one token at a time, on the CPU, in this process.

Tokens depend on the weights, the prompt and the sampling parameters alone: not on other requests, nor on where a request was aborted and
continued. There are no threads and no clock, so it runs on a virtual-time event loop. It is slow, and meant for tests.
"""

import asyncio
import contextlib
import hashlib
import math
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.utils import logging as transformers_logging

from skyrl_async.columns import VersionSpans
from skyrl_async.errors import InferenceError, PublishError, RequestRefusedError
from skyrl_async.inference.generation import OpenCalls, check_prompt, joined
from skyrl_async.inference.policy_files import UpdateValidator, eos_token_ids, require_as_sent
from skyrl_async.inference.protocol import CutOff, EngineLoad, pause_then_load
from skyrl_async.inference.vllm.adapter import MergedAdapters
from skyrl_async.runtime.tasks import Changes
from skyrl_async.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    PauseMode,
    SamplingParams,
    TopLogprobs,
    WeightUpdate,
)

_ABORTED = EngineOutput(finish_reason=FinishReason.ABORT)


class DeterministicEngine:
    """An ``InferenceEngine`` over a transformers model in float32.

    Args:
        name: unique among the run's engines.
        policy_dir: Hugging Face directory.
        version: policy version of the weights there.
        adapter_rank: rank of the adapters in updates; 0: updates hold all weights.
        max_model_len: longest prompt plus answer in tokens; None takes the model's own.
        seconds_per_token: how long a token takes on the event loop's clock, for tests in virtual time.
    """

    def __init__(
        self,
        name: str,
        policy_dir: str | Path,
        *,
        version: int = 0,
        adapter_rank: int = 0,
        max_model_len: int | None = None,
        seconds_per_token: float = 0.0,
    ) -> None:
        self.name = name
        """Name given."""
        transformers_logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            str(policy_dir), dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        self._model = model.eval().requires_grad_(False)
        self._stop_token_ids = frozenset(eos_token_ids(str(policy_dir)))
        self._validator = UpdateValidator(str(policy_dir), adapter_rank)
        self._adapters = MergedAdapters(self._model.state_dict())
        self._version = version
        self._num_loads = 0
        self.max_model_len = max_model_len or int(self._model.config.get_text_config().max_position_embeddings)
        """Longest prompt plus answer in tokens."""
        self._seconds_per_token = seconds_per_token
        self._pause_mode: PauseMode | None = None
        self._cut_off = CutOff()
        self._changes = Changes()
        self._calls = OpenCalls()

    def __reduce__(self) -> NoReturn:
        """Refuse: updates load in this process only."""
        raise InferenceError(
            f"engine {self.name} is deterministic and cannot be sent to another process: no weight update would reach its copy; "
            "set engine.backend=vllm"
        )

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """``InferenceEngine.generate``."""
        return joined([block async for block in self.stream(request)])

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """``InferenceEngine.stream``; every block is one token, or the empty end of an aborted request.

        Raises ``RequestRefusedError`` for penalties and grammars, which it does not know.
        """
        if not replace(request.sampling, bad_words=()).is_resumable:
            raise RequestRefusedError(
                f"engine {self.name} is deterministic and knows neither penalties nor structured output; "
                "leave them out, or set engine.backend=vllm"
            )
        size = self._model.get_input_embeddings().num_embeddings
        check_prompt(self.name, request.prompt_token_ids, max_model_len=self.max_model_len, vocabulary_size=size)
        sequence = _Sequence(self._model, request, self._stop_token_ids)
        with self._calls.tracking(request) as state:
            reason = None
            while reason is None:
                block = self._sample(request, sequence) if await self._may_sample(request.request_id) else _ABORTED
                reason = block.finish_reason
                state.add(block)
                yield block

    def _sample(self, request: EngineRequest, sequence: "_Sequence") -> EngineOutput:
        token, logprobs = sequence.sample_next(self._num_loads)
        return EngineOutput(
            token_ids=(token,),
            logprobs=(float(logprobs[token]),) if request.sampling.reports_logprobs else (),
            versions=VersionSpans.constant(self._version, 1),
            finish_reason=self._finish_reason(request, sequence, token),
            top_logprobs=_top_logprobs(logprobs, request.sampling.num_top_logprobs),
        )

    async def _may_sample(self, request_id: str) -> bool:
        """Wait for the time that a token takes, and until the engine is not paused; False as soon as the request is evicted.

        A token that was begun is lost then. Raises ``EngineDeadError``.
        """

        def is_leaving() -> bool:
            return self._cut_off.reason is not None or self._calls.is_evicted(request_id)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._seconds_per_token):
                await self._changes.until(is_leaving)
        await self._changes.until(lambda: self._pause_mode is None or is_leaving())
        self._cut_off.check()
        return not self._calls.is_evicted(request_id)

    def _finish_reason(self, request: EngineRequest, sequence: "_Sequence", token: int) -> FinishReason | None:
        sampling = request.sampling
        if token in sampling.stop_token_ids or (token in self._stop_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        num_new_tokens = len(sequence.token_ids) - len(request.prompt_token_ids)
        if num_new_tokens >= sampling.max_tokens or len(sequence.token_ids) >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    async def partial_outputs(self, request_ids: Collection[str]) -> dict[str, EngineOutput]:
        """``InferenceEngine.partial_outputs``."""
        self._cut_off.check()
        return self._calls.partial_outputs(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """``InferenceEngine.pause``. Sampling a token awaits nothing, so none is half done."""
        self._cut_off.check()
        if mode is PauseMode.ABORT and self._pause_mode is not mode:
            self._calls.evict()
        self._pause_mode = mode
        self._changes.notify()

    async def resume(self) -> None:
        """``InferenceEngine.resume``."""
        self._cut_off.check()
        self._pause_mode = None
        self._changes.notify()

    async def stage_weights(self, update: WeightUpdate) -> None:
        """Nothing to prepare: loading takes no time on the event loop's clock."""
        self._cut_off.check()

    async def load_weights(self, update: WeightUpdate) -> None:
        """``InferenceEngine.load_weights``; adapters are merged into the weights."""
        self._cut_off.check()
        if self._pause_mode is None:
            raise PublishError(f"engine {self.name} is not paused; pause it before loading weights {update.version}")
        self._validator.check(update)
        require_as_sent(update)
        if update.adapter is not None:
            self._adapters.load(update)
        else:
            parameters = self._model.state_dict()
            for name, tensor in load_file(update.path).items():
                parameters[name].copy_(tensor)
        self._validator.accept(update)
        self._num_loads += 1
        self._version = update.version

    async def switch_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        """``InferenceEngine.switch_weights``."""
        return await pause_then_load(self, update, mode)

    async def version(self) -> int:
        """``InferenceEngine.version``."""
        self._cut_off.check()
        return self._version

    async def checksum(self) -> str:
        """``InferenceEngine.checksum``: SHA-256 over names and bytes of the parameters."""
        self._cut_off.check()
        digest = hashlib.sha256()
        for name, parameter in sorted(self._model.named_parameters()):
            digest.update(name.encode())
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    async def ping(self) -> EngineLoad:
        """``InferenceEngine.ping``; it caches nothing between requests."""
        self._cut_off.check()
        return EngineLoad()

    async def evict(self, request_ids: Collection[str] | None = None) -> None:
        """``InferenceEngine.evict``; every request that it takes can go on elsewhere."""
        self._cut_off.check()
        self._calls.evict(request_ids)
        self._changes.notify()

    async def close(self) -> None:
        """``InferenceEngine.close``. Requests in flight raise ``EngineDeadError``."""
        self._cut_off.cut(f"engine {self.name} is gone: closed")
        self._changes.notify()


class _Sequence:
    """One request's tokens, keys and values.

    The cache is always filled in the same steps, the original prompt at once and then token by token, so that a
    continued request computes the very same numbers as one that was never aborted.
    """

    def __init__(self, model: PreTrainedModel, request: EngineRequest, eos_token_ids: Collection[int]) -> None:
        self._model = model
        self._sampling = request.sampling
        self._ends = sorted({*eos_token_ids, *request.sampling.stop_token_ids})
        self._num_before_min = len(request.prompt_token_ids) + request.sampling.min_tokens
        self._num_prompt_tokens = len(request.prompt_token_ids) - request.num_sampled_tokens
        self.token_ids = request.prompt_token_ids.tolist()
        self._cache = DynamicCache(config=model.config)
        self._num_cached_tokens = 0
        self._num_loads: int | None = None

    def sample_next(self, num_loads: int) -> tuple[int, torch.Tensor]:
        """Append one token; return it and the (V,) log-probs. ``num_loads`` tells when the weights have changed."""
        if num_loads != self._num_loads:
            self._cache, self._num_cached_tokens = DynamicCache(config=self._model.config), 0
            self._num_loads = num_loads
        while self._num_cached_tokens < len(self.token_ids):
            logits = self._forward(max(self._num_prompt_tokens, self._num_cached_tokens + 1))
        logprobs = processed_logprobs(self._biased(logits)[None], self._sampling)[0]
        token = self._choose(logprobs)
        self.token_ids.append(token)
        return token, logprobs

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        """(V,) logits of the tokens that may come next, in vLLM's order: allowed tokens, bad words, the bias, the minimum."""
        sampling = self._sampling
        banned = [word[-1] for word in sampling.bad_words if self._ends_with(word[:-1])]
        if len(self.token_ids) < self._num_before_min:
            banned += self._ends
        if sampling.allowed_token_ids:
            is_other = torch.ones_like(logits, dtype=torch.bool)
            is_other[list(sampling.allowed_token_ids)] = False
            logits = logits.masked_fill(is_other, -math.inf)
        if banned or sampling.logit_bias:
            logits = logits.clone()
            for token, bias in sampling.logit_bias:
                logits[token] += bias
            logits[banned] = -math.inf
        return logits

    def _ends_with(self, token_ids: Sequence[int]) -> bool:
        """Whether the sampled tokens end with these."""
        sampled = self.token_ids[self._num_prompt_tokens :]
        return not token_ids or sampled[-len(token_ids) :] == list(token_ids)

    @torch.inference_mode()
    def _forward(self, end: int) -> torch.Tensor:
        """Cache the tokens up to ``end``; return the logits that follow them, (V,)."""
        new_token_ids = torch.tensor([self.token_ids[self._num_cached_tokens : end]])
        logits: torch.Tensor = self._model(new_token_ids, past_key_values=self._cache, logits_to_keep=1).logits
        self._num_cached_tokens = end
        return logits[0, -1]

    def _choose(self, logprobs: torch.Tensor) -> int:
        """Greedy, or by inverting the distribution function at a number drawn from seed, prompt and position."""
        if self._sampling.temperature == 0:
            return int(logprobs.argmax())
        position = len(self.token_ids) - self._num_prompt_tokens
        counter = (self._sampling.seed, self.token_ids[: self._num_prompt_tokens], position)
        draw = int.from_bytes(hashlib.sha256(repr(counter).encode()).digest()[:8], "big") / 2**64
        cumulative = logprobs.double().exp().cumsum(0)
        token = int(torch.searchsorted(cumulative, draw * float(cumulative[-1]), right=True))
        return min(token, int(logprobs.isfinite().nonzero()[-1]))


def processed_logprobs(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """(N, V) log-probs in nats of (N, V) logits, after temperature, min_p, top_k and top_p, in vLLM's order; plain ones when greedy."""
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    warpers: list[Any] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits.log_softmax(-1)


def _top_logprobs(logprobs: torch.Tensor, num_top_logprobs: int) -> tuple[TopLogprobs, ...]:
    """The likeliest tokens of one position that truncation has left; empty if none are asked for."""
    if num_top_logprobs == 0:
        return ()
    values, tokens = logprobs.topk(min(num_top_logprobs, len(logprobs)))
    found = zip(tokens.tolist(), values.tolist(), strict=True)
    return (tuple((token, value) for token, value in found if value > -math.inf),)
