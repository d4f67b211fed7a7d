"""Every error this package raises on purpose, named by the boundary crossed.

SkyRLAsyncError
|-- ConfigError             a config key, value or combination is wrong (also a ValueError)
|-- DatasetError            a dataset file or row cannot be used
|-- PolicyError             a policy directory cannot be used, or does not match
|-- CheckpointError         a checkpoint is missing, incomplete, or of another model
|-- StateError              an accounting rule of the ledger or the staleness manager was broken
|   |-- StageError          a stage made a forbidden transition
|   `-- ChannelClosedError  an item came after the end, or none will follow
|-- InferenceError
|   |-- EngineDeadError     one engine died; its requests continue in other engines
|   |-- NoEngineError       no engine is left to serve a request
|   |-- PromptTooLongError  a prompt leaves no room for an answer in the model's context
|   |-- EngineStartError    an engine did not come up
|   |-- RequestRefusedError  an engine cannot serve a request
|   `-- SessionError        a session of the endpoint cannot serve a request
|       |-- SessionClosedError    it is finished, has expired or has reached a cap
|       `-- SessionNotFoundError  no session has that name
|-- PublishError            a weight publish failed; the old version serves everywhere
|-- GenerationError         a generator broke its contract, or too many rollouts failed
|   |-- InvalidResultError  an agent's result has the wrong form
|   |-- AgentsFailedError   no agent of a run can work, as its first samples show
|   |-- EnvironmentFailedError  what an agent works in could not be made, or was lost; not the agent's fault
|   `-- OutageError         nothing could be sampled: no endpoint or no engine answered; not the rollout's fault
|-- TrainingError           a policy worker failed, or its results are not finite
|   |-- WeightsWriteError   weights cannot be written: shared memory or a disk is full, or fails
|   |-- WeightsLostError    gathered weights were lost with the workers that held them
|   |-- WeightsTransferError  a broadcast of weights broke off; none of its engines has them
|   `-- WorkerDiedError     a policy worker died, or lost the others; new workers can continue
`-- DeadlineError           a wait took longer than its deadline; says what is stuck
"""

import difflib
from collections.abc import Iterable


class SkyRLAsyncError(Exception):
    """Base of all errors of this package: one clear line is enough for a user."""


class ConfigError(SkyRLAsyncError, ValueError):
    """A config key, value or combination is wrong."""


class DatasetError(SkyRLAsyncError):
    """A dataset file or row cannot be used."""


class PolicyError(SkyRLAsyncError):
    """A policy directory cannot be used, or does not match."""


class CheckpointError(SkyRLAsyncError):
    """A checkpoint is missing, incomplete, or of another model."""


class StateError(SkyRLAsyncError):
    """An accounting rule of the ledger or of the staleness manager was broken."""


class StageError(StateError):
    """A stage made a forbidden transition."""


class ChannelClosedError(StateError):
    """An item came after the end of a channel, or none will follow."""


class InferenceError(SkyRLAsyncError):
    """Something between the client and the engines failed."""


class EngineDeadError(InferenceError):
    """One engine died; its requests continue in other engines."""


class NoEngineError(InferenceError):
    """No engine is left to serve a request."""


class PromptTooLongError(InferenceError):
    """A prompt leaves no room for an answer in the model's context."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int, num_characters: int | None = None) -> None:
        """``num_characters``: of a text too long to be tokenized; ``num_prompt_tokens`` is then the least that the prompt can have."""
        found = f"{num_prompt_tokens}"
        if num_characters is not None:
            found = f"at least {found}: a text of {num_characters} characters was not tokenized"
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has {found} "
            "(context_length_exceeded); shorten the prompt or raise engine.max_model_len"
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        self.num_characters = num_characters

    def __reduce__(self) -> tuple[type, tuple[int, int, int | None]]:
        return type(self), (self.num_prompt_tokens, self.max_model_len, self.num_characters)


class EngineStartError(InferenceError):
    """An engine did not come up."""


class RequestRefusedError(InferenceError):
    """An engine cannot serve a request, such as one with a broken JSON schema."""


class SessionError(InferenceError):
    """A session of the endpoint cannot serve a request."""


class SessionClosedError(SessionError):
    """A session is finished, has expired or has reached a cap: nothing more is sampled in it."""


class SessionNotFoundError(SessionError):
    """No session has that name, or it was deleted."""


class PublishError(SkyRLAsyncError):
    """A weight publish failed; the old version serves everywhere."""


class GenerationError(SkyRLAsyncError):
    """A generator broke its contract, or too many rollouts failed."""


class OutageError(GenerationError):
    """Nothing could be sampled: no endpoint or no engine answered. Not the rollout's fault."""


class InvalidResultError(GenerationError):
    """An agent's result has the wrong form, whatever the policy said."""


class AgentsFailedError(GenerationError):
    """No agent of a run can work, as its first samples show: the run ends at once, and nothing is tried again."""


class EnvironmentFailedError(GenerationError):
    """What an agent works in could not be made, or was lost. Not the agent's fault: no reward is known."""


ENDS_RUN = (NoEngineError, AgentsFailedError)
"""Raised by a generator, these end the run at once: no further try can succeed."""


class TrainingError(SkyRLAsyncError):
    """A policy worker failed, or its results are not finite."""


class WeightsWriteError(TrainingError):
    """Weights cannot be written: shared memory or a disk is full, or fails. The policy is unchanged."""


class WeightsLostError(TrainingError):
    """Gathered weights were lost with the workers that held them; the new workers hold later weights."""


class WeightsTransferError(TrainingError):
    """A broadcast of weights broke off; none of its engines has them. They can be broadcast again in another group."""


class WorkerDiedError(TrainingError):
    """A policy worker died, or lost the others; new workers can continue."""


class DeadlineError(SkyRLAsyncError):
    """A wait took longer than its deadline; says what is stuck."""


def in_one_line(error: BaseException) -> str:
    """The error's class, and the first and the last line of its message, fit for a terminal."""
    return f"{type(error).__name__}: {printable(first_and_last_line(str(error)))}"


def printable(text: str) -> str:
    """Text from outside with escapes in place of what a terminal would obey: characters that are neither printable nor ends of lines."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def first_and_last_line(text: str) -> str:
    """The lines, with dots for what is between them."""
    first, *others = text.strip().splitlines() or [""]
    return f"{first} ... {others[-1].strip()}" if others else first


def did_you_mean(word: str, known: Iterable[str], *, n: int = 1, cutoff: float = 0.6) -> str:
    """The end of a message about an unknown ``word``: at most ``n`` of the ``known`` ones that are close; empty without any."""
    close = difflib.get_close_matches(word, list(known), n=n, cutoff=cutoff)
    return f"; did you mean {' or '.join(close)}?" if close else ""
