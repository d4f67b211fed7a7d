"""The fields of vLLM's requests that are not served: those that would change what is sampled, and those that change nothing of it.

Flows in: the fields of a body that its schema does not have, and sampling parameters. Flows out: nothing, or a refusal by name. Does
not know which surface asks.
Together with the schemas it knows every field of the vLLM that is installed, which a test holds it to.
"""

from collections.abc import Mapping
from typing import Any

from skyrl_async.endpoint.requests.body_fields import refused
from skyrl_async.types import SamplingParams

_OFF: tuple[Any, ...] = (None, False, "", [], {})
"""Values by which a field asks for nothing."""

REFUSED: Mapping[str, str] = {
    "add_special_tokens": "prompts are encoded as they stand; write special tokens into the prompt",
    "best_of": "set n and choose among the choices",
    "chat_template": "the policy's own template is used",
    "chat_template_kwargs": "the policy's template is rendered as it is; set its defaults in the policy's tokenizer",
    "continue_final_message": "an answer that is begun is not continued; send its tokens to /v1/completions",
    "documents": "write them into messages",
    "echo": "only /v1/completions echoes prompts",
    "guided_whitespace_pattern": "grammars are followed with the engine's own white space",
    "logprob_token_ids": "log-probs are of sampled tokens and of the likeliest ones; set top_logprobs",
    "previous_input_messages": "send the earlier items in input",
    "prompt_embeds": "send token ids in prompt",
    "prompt_logprobs": "log-probs are of sampled tokens",
    "repetition_detection": "set max_tokens or stop",
    "thinking_token_budget": "set max_tokens",
    "truncate_prompt_tokens": "prompts are not cut; send a shorter one",
    "use_beam_search": "answers are sampled; set n",
}
"""What would change prompt, sampling or result -> what to do instead."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"thinking_token_budget": (-1,), "best_of": (1,)}
"""Further values that ask for nothing."""

REFUSED_UNLESS_TRUE: Mapping[str, str] = {
    "add_generation_prompt": "a prompt that ends in no turn of the assistant's can be sent to /v1/completions as tokens",
}
"""What is on unless it is switched off -> what to do instead."""

IGNORED: Mapping[str, str] = {
    "cache_salt": "prefixes are cached for all",
    "ec_transfer_params": "nothing is disaggregated",
    "enable_response_messages": "the reply has no copy of its messages",
    "guided_decoding_backend": "the engine has one",
    "include_reasoning": "reasoning stands in a field of its own",
    "kv_transfer_params": "nothing is disaggregated",
    "length_penalty": "of beam search, which is refused",
    "max_tool_calls": "of tools that the server runs",
    "media_io_kwargs": "there is text only",
    "mm_payload": "there is text only",
    "mm_processor_kwargs": "there is text only",
    "parallel_tool_calls": "the policy's calls are told as they were sampled",
    "prompt_cache_key": "prefixes are cached for all",
    "reasoning_effort": "how much is thought is the policy's affair",
    "request_id": "replies have ids of their own",
    "return_mm_kwargs": "there is text only",
    "return_prompt_text": "return_token_ids has the prompt's tokens",
    "return_token_offsets": "of surfaces that render only",
    "routed_experts_prompt_start": "experts are not reported",
    "service_tier": "there is one",
    "spaces_between_special_tokens": "nothing is put between tokens",
    "store": "nothing is stored",
    "stream_interval": "blocks of a stream are the engine's",
    "truncation": "prompts are not cut, and an overlong one is refused",
    "truncation_side": "of truncate_prompt_tokens, which is refused",
    "user": "sessions have keys",
    "vllm_xargs": "of extensions, of which there are none",
    "watermarking": "no watermark is configured",
}
"""What changes nothing that is sampled -> why."""


def refuse_unserved(fields: Mapping[str, Any]) -> None:
    """Raise ``ApiError`` for a field that asks for what is not served."""
    for name, advice in REFUSED.items():
        value = fields.get(name)
        if not any(type(value) is type(off) and value == off for off in _OFF + _NEUTRAL.get(name, ())):
            raise refused(name, f"is not served; {advice}", code="unsupported_parameter")
    for name, advice in REFUSED_UNLESS_TRUE.items():
        if fields.get(name) is False:
            raise refused(name, f"must be true, got false; {advice}", code="unsupported_parameter")


_INEXACT = ("min_tokens", "logit_bias", "allowed_token_ids", "bad_words")
"""What samples from another distribution than the one whose log-probs the trainer computes."""


def refuse_inexact(asked: SamplingParams) -> None:
    """Raise ``ApiError`` for what a session that samples for a trainer must not be asked."""
    for name in _INEXACT:
        if getattr(asked, name):
            reason = "changes the distribution that this session's trainer computes log-probs of"
            advice = "leave it out, or send a key that is no session's"
            raise refused(name, f"{reason}; {advice}", code="unsupported_parameter")
