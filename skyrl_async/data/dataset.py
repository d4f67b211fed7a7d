"""Prompts from files, in SkyRL's format.

A row has ``prompt`` (a list of messages, or a string: one user message) and ``env_class`` (unless a default is given). Every other column
(``reward_spec``, ``max_turns``, ...) and the entries of ``extra_info`` become extras, for the environment's constructor. ``uid`` is
optional; without it, a hash of the row's content is the uid.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_async.chat import normalise_messages
from skyrl_async.data.sources import rows_of
from skyrl_async.errors import DatasetError
from skyrl_async.types import Message, Prompt

logger = logging.getLogger(__name__)

_NO_ENVIRONMENT = "none"
_REWARDED_WITHOUT = "a reward function without environments: generator.reward with generator=agent, else task.reward"
_OWN_COLUMNS = frozenset({"uid", "prompt", "env_class"})


def load_sources(
    files: Sequence[Path],
    default_env_class: str | None,
    *,
    needs_environment: bool = True,
    check: Callable[[Prompt], None] = lambda prompt: None,
) -> tuple[tuple[Prompt, ...], ...]:
    """Return the prompts of each of ``files``, in order. Uids are unique across files.

    Args:
        files: files and directories, as ``data.sources`` reads them.
        default_env_class: for rows without ``env_class``.
        needs_environment: False if no environment runs or rewards the rows; ``env_class`` may then be empty.
        check: called with each prompt; any exception refuses the row.

    Raises:
        DatasetError: a file is missing or of another kind, a row is invalid, two rows have one uid, or there are no rows. The message
            names the file and the line.
    """
    place_of: dict[str, str] = {}
    env_class = default_env_class if needs_environment else default_env_class or _NO_ENVIRONMENT
    sources = tuple(tuple(_prompts_of(Path(file), env_class, place_of, check)) for file in files)
    if not place_of:
        raise DatasetError(f"no prompts in {', '.join(str(file) for file in files) or 'an empty list of files'}")
    return sources


def filter_long_prompts(
    prompts: Sequence[Prompt], num_tokens_of: Callable[[Prompt], int], max_prompt_tokens: int
) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    """Return the prompts of at most ``max_prompt_tokens`` tokens, and the uids of the longer ones.

    Raises ``DatasetError`` if all prompts are longer.
    """
    num_tokens = {prompt.uid: num_tokens_of(prompt) for prompt in prompts}
    kept = tuple(prompt for prompt in prompts if num_tokens[prompt.uid] <= max_prompt_tokens)
    dropped = {uid: num for uid, num in num_tokens.items() if num > max_prompt_tokens}
    if prompts and not kept:
        raise DatasetError(
            f"all {len(dropped)} prompts are longer than the {max_prompt_tokens} tokens that the model's context leaves "
            f"for a prompt (the shortest has {min(dropped.values())}); raise engine.max_model_len or shorten them"
        )
    if dropped:
        logger.warning(
            "%d of %d prompts are longer than %d tokens and left out: %s",
            len(dropped),
            len(prompts),
            max_prompt_tokens,
            ", ".join(list(dropped)[:10]) + (", ..." if len(dropped) > 10 else ""),
        )
    return kept, tuple(dropped)


def _prompts_of(
    source: Path, default_env_class: str | None, place_of: dict[str, str], check: Callable[[Prompt], None]
) -> Iterator[Prompt]:
    """Yield the prompts of one source, and record the place of each uid in ``place_of``."""
    for place, row in rows_of(source):
        prompt = _prompt_of(row, place, default_env_class)
        if prompt.uid in place_of:
            raise DatasetError(
                f"{place} has the uid {prompt.uid!r} of {place_of[prompt.uid]}; "
                "uids must be unique (rows without a uid are known by their content: remove the copy)"
            )
        place_of[prompt.uid] = place
        try:
            check(prompt)
        except Exception as error:
            raise DatasetError(
                f"{place} cannot be used by env_class {prompt.env_class!r}: {error}; "
                f"mend the row, name another env_class, or set {_REWARDED_WITHOUT}"
            ) from error
        yield prompt


def _prompt_of(row: Mapping[str, Any], place: str, default_env_class: str | None) -> Prompt:
    env_class = row.get("env_class") or default_env_class
    if not isinstance(env_class, str) or not env_class:
        raise DatasetError(
            f"{place} needs env_class, a non-empty string, got {env_class!r}; or set task.env_class, or {_REWARDED_WITHOUT}"
        )
    uid = row.get("uid")
    if uid is not None and (not isinstance(uid, str | int) or uid == ""):
        raise DatasetError(f"{place} has the uid {uid!r}; a uid must be a non-empty string or an integer")
    extras = {column: value for column, value in row.items() if column not in _OWN_COLUMNS}
    extra_info = extras.get("extra_info")
    if isinstance(extra_info, Mapping):
        extras = {**extra_info, **extras}
    messages = _messages_of(row, place)
    try:
        json.dumps([uid, messages], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise DatasetError(
            f"{place} has half of a surrogate pair in uid or prompt, which no text has: {error}"
        ) from error
    return Prompt(
        uid=_content_hash(row) if uid is None else str(uid),
        messages=messages,
        env_class=env_class,
        extras=extras,
    )


def _messages_of(row: Mapping[str, Any], place: str) -> tuple[Message, ...]:
    prompt = row.get("prompt")
    if isinstance(prompt, str) and prompt:
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list) or not prompt:
        raise DatasetError(f"{place} needs prompt, a string or a list of messages, neither empty, got {prompt!r}")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DatasetError(f"{place} has in prompt {message!r}; a message must be an object with a role")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DatasetError(f"{place} has in prompt {message!r}; a message must have a content")
    try:
        normalise_messages(prompt)
    except ValueError as error:
        raise DatasetError(f"{place} has a prompt that no chat template takes: {error}") from error
    return tuple({key: value for key, value in message.items() if value is not None} for message in prompt)


def _content_hash(row: Mapping[str, Any]) -> str:
    canonical = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:16]
