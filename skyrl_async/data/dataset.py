"""Prompts from files in SkyRL's format: jsonl or parquet, one row per prompt.

Columns: ``prompt`` (a list of messages, or a string for one user message), ``env_class``, optionally ``uid``; every other column
(``reward_spec``, ``extra_info``, ...) is what the environment is made with. Flows in: files. Flows out: prompts, or ``DatasetError``
naming file and line. Knows no environment and no tokenizer.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from skyrl_async.errors import DatasetError
from skyrl_async.types import Message, Prompt

_OWN_COLUMNS = ("uid", "prompt", "env_class")


def load_prompts(files: Sequence[Path], default_env_class: str | None) -> tuple[Prompt, ...]:
    """Read every row of every file, in order.

    Args:
        files: ``.jsonl`` (or ``.json``, one object per line) and ``.parquet``.
        default_env_class: environment of rows that name none.

    Raises:
        DatasetError: a file is missing or of another kind, a row is broken or lacks its prompt or environment, a uid occurs
            twice, or there is no row at all.
    """
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for file in files:
        for where, row in _rows(Path(file).expanduser()):
            prompt = _prompt(row, where, default_env_class)
            if prompt.uid in seen:
                raise DatasetError(
                    f"{where}: uid {prompt.uid!r} is also that of {seen[prompt.uid]}; uids must be unique"
                )
            seen[prompt.uid] = where
            prompts.append(prompt)
    if not prompts:
        raise DatasetError(
            f"no prompts in {', '.join(map(str, files)) or 'an empty list of files'}; add at least one row"
        )
    return tuple(prompts)


def filter_long_prompts(
    prompts: Sequence[Prompt], num_tokens_of: Callable[[Prompt], int], max_prompt_tokens: int
) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    """The prompts of at most ``max_prompt_tokens`` tokens, and the uids of the others.

    Raises ``DatasetError`` when none is left.
    """
    kept: list[Prompt] = []
    dropped: list[Prompt] = []
    for prompt in prompts:
        (kept if num_tokens_of(prompt) <= max_prompt_tokens else dropped).append(prompt)
    if not kept:
        raise DatasetError(
            f"all {len(dropped)} prompts are longer than {max_prompt_tokens} tokens (the first: {dropped[0].uid}); "
            "raise engine.max_model_len or shorten the prompts"
            if dropped
            else "there are no prompts to filter"
        )
    return tuple(kept), tuple(prompt.uid for prompt in dropped)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of each row."""
    if not file.is_file():
        raise DatasetError(f"{file} is not there; correct task.train_files or task.eval_files")
    if file.suffix == ".parquet":
        yield from _parquet_rows(file)
    elif file.suffix in (".jsonl", ".json"):
        yield from _jsonl_rows(file)
    else:
        raise DatasetError(f"{file} must end in .jsonl, .json or .parquet, got {file.suffix!r}")


def _jsonl_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DatasetError(f"{where} is not JSON: {error}; write one object per line") from error
            if not isinstance(row, dict):
                raise DatasetError(f"{where} must be a JSON object, got {type(row).__name__}")
            yield where, row


def _parquet_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DatasetError(f"{file}: reading parquet needs pyarrow; install it, or give a .jsonl file") from error
    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file} cannot be read as parquet: {error}") from error
    for number, row in enumerate(rows, 1):
        yield f"{file}, row {number}", {name: value for name, value in row.items() if value is not None}


def _prompt(row: dict[str, Any], where: str, default_env_class: str | None) -> Prompt:
    messages = _messages(row.get("prompt"), where)
    env_class = row.get("env_class") or default_env_class
    if not isinstance(env_class, str):
        raise DatasetError(f"{where} must name its environment in env_class (or set task.env_class), got {env_class!r}")
    extras = {name: value for name, value in row.items() if name not in _OWN_COLUMNS}
    uid = row.get("uid")
    if uid is None:
        content = json.dumps([messages, env_class, extras], sort_keys=True, default=str)
        uid = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Prompt(uid=str(uid), messages=messages, env_class=env_class, extras=extras)


def _messages(prompt: Any, where: str) -> tuple[Message, ...]:
    if isinstance(prompt, str) and prompt:
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list) or not prompt:
        raise DatasetError(f"{where}: prompt must be a text or a list of messages, got {_short(prompt)}")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DatasetError(f"{where}: a message of prompt must have role and content, got {_short(message)}")
    return tuple(prompt)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
