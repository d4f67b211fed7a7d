"""Converts our requests to vLLM's, and its outputs to ours. vLLM is imported in functions, so never before an engine has booted."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_async.columns import NO_LOGPROBS, VersionSpans, column
from skyrl_async.errors import InferenceError
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason, TopLogprobs

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, WeightVersionSpan

_SAME_IN_VLLM = (
    *("max_tokens", "min_tokens", "ignore_eos", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields of ``SamplingParams`` with the same name and meaning in vLLM's."""


def vllm_sampling_params(
    request: EngineRequest, *, streams: bool, stop_token_ids: list[int], stream_interval: int
) -> Any:
    """vLLM's ``SamplingParams``; ``stream_interval`` applies if the request sets none. Raises vLLM's own errors."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    sampling, form = request.sampling, request.sampling.structured
    grammar = form and StructuredOutputsParams(
        json=form.json_schema,
        json_object=form.json_object or None,
        regex=form.regex,
        choice=None if form.choice is None else list(form.choice),
        grammar=form.grammar,
    )
    params = SamplingParams(
        **{name: getattr(sampling, name) for name in _SAME_IN_VLLM},
        structured_outputs=grammar,
        stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else stop_token_ids)],
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        logprobs=sampling.num_top_logprobs if sampling.reports_logprobs else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
        stream_interval=request.stream_interval or stream_interval,
        skip_clone=True,
    )
    # vLLM's frontend sets this when it tokenizes bad words. Here they are tokens already: an engine may have no tokenizer.
    params._bad_words_token_ids = [list(word) for word in sampling.bad_words] or None
    return params


def engine_output(
    completion: "CompletionOutput", versions: VersionSpans, num_top_logprobs: int, num_cached_tokens: int | None = None
) -> EngineOutput:
    """Tokens with log-probs (flat ones) and versions. Raises ``InferenceError`` for a finish reason of vLLM's own."""
    try:
        reason = None if completion.finish_reason is None else FinishReason(completion.finish_reason)
    except ValueError as error:
        raise InferenceError(f"vLLM ended a request with finish_reason {completion.finish_reason!r}") from error
    logprobs = NO_LOGPROBS
    top_logprobs: tuple[TopLogprobs, ...] = ()
    if flat := completion.logprobs:
        logprobs = column(flat.logprobs, np.float32)
        if num_top_logprobs:
            logprobs = logprobs[flat.start_indices]
            top_logprobs = _top_logprobs(flat, num_top_logprobs)
    return EngineOutput(
        token_ids=completion.token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=reason,
        top_logprobs=top_logprobs,
        num_cached_tokens=num_cached_tokens or 0,
    )


def partial_output(state: Any) -> EngineOutput:
    """All tokens so far of a running request, from the frontend's record."""
    completion = state._new_completion_output(list(state.detokenizer.output_token_ids), None, None)
    num_top_logprobs = state.logprobs_processor.num_logprobs or 0
    versions = versions_of(state._weight_version_spans())
    return engine_output(completion, versions, num_top_logprobs, state.num_cached_tokens)


def _top_logprobs(flat: "FlatLogprobs", num_top_logprobs: int) -> tuple[TopLogprobs, ...]:
    """The likeliest tokens of each position, without those that truncation or a grammar has excluded.

    A position holds the sampled token and then the likeliest ones, the sampled one among them once or twice.
    """
    positions: list[TopLogprobs] = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        found = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        likeliest = sorted(found.items(), key=lambda entry: entry[1], reverse=True)[:num_top_logprobs]
        positions.append(tuple(entry for entry in likeliest if entry[1] > -math.inf))
    return tuple(positions)


def versions_of(spans: "Sequence[WeightVersionSpan] | None") -> VersionSpans:
    """From vLLM's spans."""
    return VersionSpans.joined(VersionSpans.constant(int(span.version), span.end - span.start) for span in spans or ())
