"""The blocks of a streamed answer as the completion they add up to.

Flows in: deltas. Flows out: a completion, so that a surface ends streams and whole replies in the same way. Does not know wire
formats.
"""

from collections.abc import Sequence

from skyrl_async.types import Completion, CompletionDelta, FinishReason


def joined_completion(prompt_token_ids: tuple[int, ...], deltas: Sequence[CompletionDelta]) -> Completion:
    """The completion that ``deltas`` are the blocks of."""
    return Completion(
        prompt_token_ids=prompt_token_ids,
        token_ids=tuple(i for delta in deltas for i in delta.token_ids),
        logprobs=tuple(p for delta in deltas for p in delta.logprobs),
        versions=tuple(v for delta in deltas for v in delta.versions),
        text="".join(delta.text for delta in deltas),
        finish_reason=(deltas[-1].finish_reason if deltas else None) or FinishReason.STOP,
        top_logprobs=tuple(top for delta in deltas for top in delta.top_logprobs),
        num_aborts=sum(delta.num_aborts for delta in deltas),
        num_cached_tokens=deltas[-1].num_cached_tokens if deltas else 0,
    )
