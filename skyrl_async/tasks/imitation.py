"""A task made of conversations from files, on which a tiny policy is warm-started before reinforcement on a user's own prompts.

A row has ``messages``: a prompt and the policy's answer to it, over one turn or several. Rows with ``guess`` true are hasty answers. They
are learned only in the second phase of the warm start, where their share is ``policy.warm_start.terse_share``.
"""

import hashlib
import json
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from skyrl_async.errors import DatasetError
from skyrl_async.types import Message, Prompt

MIN_CONVERSATIONS = 100
"""The warm start holds back up to 48 of them to measure its progress."""


class ImitationTask:
    """Conversations as a task for ``warm_start``.

    Args:
        rows: (place for error messages, row).
        held_out: prompts that must not be learned.

    Raises:
        DatasetError: a row is not a conversation or answers a held-out prompt, or there are too few.
    """

    def __init__(self, rows: Iterable[tuple[str, Mapping[str, Any]]], held_out: Collection[Prompt]) -> None:
        hidden = {_key(prompt.messages) for prompt in held_out}
        self._worked: dict[str, list[Message]] = {}
        self._guesses: list[list[Message]] = []
        for place, row in rows:
            conversation = _conversation(row, place)
            uid = _key(_prompt_of(conversation))
            if uid in hidden:
                raise DatasetError(
                    f"{place} answers a prompt of task.eval_files; take it out of policy.warm_start.files"
                )
            if row.get("guess"):
                self._guesses.append(conversation)
            else:
                self._worked[uid] = conversation
        if len(self._worked) < MIN_CONVERSATIONS:
            raise DatasetError(
                f"policy.warm_start.files must hold at least {MIN_CONVERSATIONS} conversations of different prompts (without guess), "
                f"got {len(self._worked)}"
            )
        self._uids = list(self._worked)
        described = json.dumps([self._worked, self._guesses])
        self.name = f"files-{hashlib.sha256(described.encode()).hexdigest()[:16]}"

    def draw_prompt(self, rng: random.Random) -> Prompt:
        """Return the prompt of any conversation."""
        uid = rng.choice(self._uids)
        return Prompt(uid=uid, messages=tuple(_prompt_of(self._worked[uid])), env_class="none")

    def conversation(
        self, prompt: Prompt, rng: random.Random, *, terse_share: float = 0.0, slip_rate: float = 0.0
    ) -> list[Message]:
        """Return the prompt's conversation or, with probability ``terse_share``, a guess if there is any. There are no slips."""
        if terse_share > 0 and self._guesses and rng.random() < terse_share:
            return rng.choice(self._guesses)
        return self._worked[prompt.uid]


def _conversation(row: Mapping[str, Any], place: str) -> list[Message]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise DatasetError(f"{place} needs messages, a list of objects with role and content, got {messages!r}")
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise DatasetError(f"{place} has in messages {message!r}; a message must have a role and a content")
    if not messages or messages[-1]["role"] != "assistant" or messages[0]["role"] == "assistant":
        raise DatasetError(f"{place} needs messages that begin with a prompt and end with the assistant's")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _prompt_of(conversation: Sequence[Message]) -> list[Message]:
    first = next(index for index, message in enumerate(conversation) if message["role"] == "assistant")
    return list(conversation[:first])


def _key(messages: Sequence[Message]) -> str:
    plain = [[message["role"], message.get("content")] for message in messages]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]
