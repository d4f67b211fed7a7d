"""The segments of one generation, joined to one sequence.

Flows in: what engines sampled, block by block. Flows out: token ids, log-probs and versions of equal length, and why it ended.
Does not know engines, text or routing.
"""

from dataclasses import replace

from skyrl_async.errors import InferenceError
from skyrl_async.types import EngineOutput, FinishReason


class Joined:
    """The segments of one generation, as one sequence."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason: FinishReason | None = None
        """``stop`` or ``length`` once the generation has ended."""
        self.num_aborts = 0

    @property
    def has_ended(self) -> bool:
        """Nothing more is to be sampled."""
        return self.finish_reason is not None

    def add(self, output: EngineOutput) -> None:
        """Append what an engine sampled. Raises ``InferenceError`` when a token lacks its log-prob or version."""
        if not len(output.token_ids) == len(output.logprobs) == len(output.versions):
            raise InferenceError(
                f"an engine returned {len(output.token_ids)} tokens with {len(output.logprobs)} log-probs and "
                f"{len(output.versions)} versions; every token needs one of each"
            )
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        self.versions.extend(output.versions)
        if output.finish_reason is not FinishReason.ABORT:
            self.finish_reason = output.finish_reason

    def end_at(self, num_tokens: int) -> None:
        """A stop string has ended the generation."""
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:], self.versions[num_tokens:]
        self.finish_reason = FinishReason.STOP


def head_of(output: EngineOutput, num_tokens: int) -> EngineOutput:
    """The last block of a generation that a stop string ends."""
    return EngineOutput(
        token_ids=output.token_ids[:num_tokens],
        logprobs=output.logprobs[:num_tokens],
        versions=output.versions[:num_tokens],
        finish_reason=FinishReason.STOP,
    )


def without_abort(output: EngineOutput) -> EngineOutput:
    """A block as the consumer sees it: an abort is no end."""
    return replace(output, finish_reason=None) if output.finish_reason is FinishReason.ABORT else output
