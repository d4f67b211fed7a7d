"""Prompts from files, in SkyRL's format.

A row has ``prompt`` (a list of messages, or a string: one user message), ``env_class`` (unless a default is given), and
whatever the environment is made with (``reward_spec``, ``max_turns``, ...): every other column, and the entries of
``extra_info``, become extras. ``uid`` is optional; without it a row is known by a hash of its content.

Flows in: jsonl and parquet files. Flows out: prompts. This module does not know tokenizers, environments or epochs.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_async.errors import DatasetError
from skyrl_async.types import Message, Prompt

logger = logging.getLogger(__name__)

_NO_ENVIRONMENT = "none"
_OWN_COLUMNS = frozenset({"uid", "prompt", "env_class"})


def load_prompts(
    files: Sequence[Path], default_env_class: str | None, *, needs_environment: bool = True
) -> tuple[Prompt, ...]:
    """Return the prompts of ``files`` in order.

    Args:
        files: ``.jsonl`` (or ``.json`` with one object per line) and ``.parquet``.
        default_env_class: for rows without ``env_class``.
        needs_environment: False where nothing plays or judges rows by an environment; ``env_class`` may then be empty.

    Raises:
        DatasetError: a file is missing or of another kind, a row cannot be used, two rows have one uid, or no row is left.
            The message names the file and the line.
    """
    prompts: list[Prompt] = []
    place_of: dict[str, str] = {}
    for file in files:
        for place, row in _rows(Path(file)):
            prompt = _prompt_of(
                row, place, default_env_class if needs_environment else default_env_class or _NO_ENVIRONMENT
            )
            if prompt.uid in place_of:
                raise DatasetError(
                    f"{place} has the uid {prompt.uid!r} of {place_of[prompt.uid]}; "
                    "uids must be unique (rows without a uid are known by their content: remove the copy)"
                )
            place_of[prompt.uid] = place
            prompts.append(prompt)
    if not prompts:
        raise DatasetError(f"no prompts in {', '.join(str(file) for file in files) or 'an empty list of files'}")
    return tuple(prompts)


def filter_long_prompts(
    prompts: Sequence[Prompt], num_tokens_of: Callable[[Prompt], int], max_prompt_tokens: int
) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    """Return the prompts of at most ``max_prompt_tokens`` tokens, and the uids of those left out.

    Raises ``DatasetError`` when prompts were given and none is left.
    """
    kept: list[Prompt] = []
    dropped: dict[str, int] = {}
    for prompt in prompts:
        num_tokens = num_tokens_of(prompt)
        if num_tokens <= max_prompt_tokens:
            kept.append(prompt)
        else:
            dropped[prompt.uid] = num_tokens
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
    return tuple(kept), tuple(dropped)


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row with the words that name its place."""
    if not file.is_file():
        raise DatasetError(f"dataset file {file} does not exist; check task.train_files and task.eval_files")
    if file.suffix == ".parquet":
        return _parquet_rows(file)
    if file.suffix in (".jsonl", ".json"):
        return _json_rows(file)
    raise DatasetError(f"dataset file {file} must end in .jsonl or .parquet, got {file.suffix!r}")


def _json_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file} line {number}"
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DatasetError(f"{place} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DatasetError(f"{place} must be a JSON object, got {type(row).__name__}")
            yield place, row


def _parquet_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from pyarrow import ArrowInvalid, parquet

    try:
        table = parquet.read_table(file)
    except (ArrowInvalid, OSError) as error:
        raise DatasetError(f"{file} is not a parquet file: {error}") from error
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{file} row {number}", {column: value for column, value in row.items() if value is not None}


def _prompt_of(row: Mapping[str, Any], place: str, default_env_class: str | None) -> Prompt:
    env_class = row.get("env_class") or default_env_class
    if not isinstance(env_class, str) or not env_class:
        raise DatasetError(f"{place} needs env_class, a non-empty string, got {env_class!r}; or set task.env_class")
    uid = row.get("uid")
    if uid is not None and not isinstance(uid, str | int):
        raise DatasetError(f"{place} has the uid {uid!r}; a uid must be a string or an integer")
    extras = {column: value for column, value in row.items() if column not in _OWN_COLUMNS}
    extra_info = extras.get("extra_info")
    if isinstance(extra_info, Mapping):
        extras = {**extra_info, **extras}
    return Prompt(
        uid=_content_hash(row) if uid is None else str(uid),
        messages=_messages_of(row, place),
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
    return tuple({key: value for key, value in message.items() if value is not None} for message in prompt)


def _content_hash(row: Mapping[str, Any]) -> str:
    canonical = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
