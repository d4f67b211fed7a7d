"""The files of a record: ``samples/<first row>-<row after the last>.parquet``, each whole or not there.

    000000000128-000000000136.part.parquet       rows of one step
    000000000000-000000000128.parquet            parts, joined
    000000000000-000000000128.figures.parquet    the same without texts and tokens, to stay below the limit

pandas, duckdb and Hugging Face ``datasets`` read the directory as it is. A kill between joining and deletion leaves rows in two files;
readers here, and the next run, take no notice of the smaller one.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_async.errors import CheckpointError
from skyrl_async.record.table import LONG_COLUMNS, ROW_COLUMNS, schema
from skyrl_async.weights.formats import sync

if TYPE_CHECKING:
    import pyarrow as pa
    from tokenizers import Tokenizer

DIRECTORY = "samples"
"""Folder in a run's directory."""
TOKENIZER = "tokenizer.json"
"""Beside it: the tokenizer of the run, in the format of Hugging Face's ``tokenizers``, so that a reader knows the text of each token."""
_NAME = re.compile(r"(\d{12})-(\d{12})(\.part|\.figures|)\.parquet")
_WRITING = ".writing"
_ROW_GROUP_BYTES = 16 << 20
_PART_ENCODING: dict[str, Any] = {
    "use_dictionary": ["outcome", "reason", "uid", "turns.list.element.role"],
    "compression": "none",
    "write_statistics": ["row", "step", "uid"],
}
"""Half the time of a compressed part, and twice its bytes: at most 64 MB until it is joined. Readers filter by the columns with statistics;
those of tokens would take a tenth of the time."""
_ENCODING: dict[str, Any] = {
    **_PART_ENCODING,
    "use_byte_stream_split": [f"{name}.list.element" for name, dtype in ROW_COLUMNS.items() if dtype == np.float32],
    "compression": "zstd",
}
"""Half the time of the defaults, and a tenth less on disk."""


@dataclass(frozen=True, slots=True)
class SamplesFile:
    """One file."""

    path: Path
    first: int
    """Its first row."""
    end: int
    """After its last row."""
    kind: str
    """``.part``, ``.figures``, or nothing."""

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def num_rows(self) -> int:
        import pyarrow.parquet as pq

        with _reading(self.path):
            return int(pq.read_metadata(self.path).num_rows)


def file_of(directory: Path, first: int, end: int, kind: str = "") -> SamplesFile:
    """The file for these rows."""
    return SamplesFile(directory / f"{first:012}-{end:012}{kind}.parquet", first, end, kind)


def files_in(directory: Path) -> list[SamplesFile]:
    """The files, in order of their rows, without those whose rows another file holds."""
    names = (_NAME.fullmatch(path.name) for path in directory.iterdir()) if directory.is_dir() else ()
    found = [file_of(directory, int(name[1]), int(name[2]), name[3]) for name in names if name]
    files: list[SamplesFile] = []
    for file in sorted(found, key=lambda f: (f.first, -f.end, f.kind == ".figures")):
        if not files or file.end > files[-1].end:
            files.append(file)
    return files


def read_samples(
    run_dir: Path,
    columns: Sequence[str] | None = None,
    *,
    uid: str | None = None,
    begin: int = 0,
    end: int = sys.maxsize,
) -> "pa.Table":
    """The rows of a run, in order; the run may go on meanwhile.

    Args:
        run_dir: directory of the run.
        columns: all if None.
        uid: only rows of this prompt.
        begin, end: only rows from ``begin`` to before ``end``, by their numbers.

    Raises ``CheckpointError`` for a file that is damaged or of another format.
    """
    import pyarrow as pa

    wanted = schema() if columns is None else pa.schema([schema().field(name) for name in columns])
    only: list[tuple[str, str, Any]] = (
        [("row", ">=", begin), ("row", "<", end)] if begin > 0 or end < sys.maxsize else []
    )
    only += [("uid", "==", uid)] if uid is not None else []
    while True:
        files = [file for file in files_in(run_dir / DIRECTORY) if file.end > begin and file.first < end]
        try:
            return pa.concat_tables([wanted.empty_table(), *_tables(files, columns, only)])
        except FileNotFoundError:  # the run has joined or thinned files
            if set(files) <= set(files_in(run_dir / DIRECTORY)):
                raise


def find_samples(run_dir: Path, words: str, at_most: int, begin: int = 0) -> list[int]:
    """The numbers of the newest rows from ``begin`` on with ``words`` in the text of a turn, in any case; at most so many.

    Holds one row group (16 MB) in memory at a time. Raises as ``read_samples``.
    """
    found: list[int] = []
    before = sys.maxsize
    """Rows from here on are searched."""
    while before > begin:
        files = [file for file in files_in(run_dir / DIRECTORY) if file.first < before and file.end > begin]
        if not files:
            break
        try:
            rows = _rows_with(files[-1], words)
        except FileNotFoundError:  # the run has joined or thinned it
            if files[-1] in files_in(run_dir / DIRECTORY):
                raise
            continue
        found += [row for row in rows if begin <= row < before]
        if len(found) >= at_most:
            return found[:at_most]
        before = files[-1].first
    return found


def _rows_with(file: SamplesFile, words: str) -> list[int]:
    """The numbers of a file's rows with ``words`` in the text of a turn, the newest first."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    found: list[int] = []
    with _reading(file.path):
        opened = pq.ParquetFile(file.path)
    with opened, _reading(file.path, opened.schema_arrow):
        for group in reversed(range(opened.num_row_groups)):
            table = opened.read_row_group(group, columns=["row", "turns.list.element.text"])
            turns = table["turns"].combine_chunks()
            texts = pc.struct_field(pc.list_flatten(turns), "text")
            has_words = pc.match_substring(texts, words, ignore_case=True)
            places = pc.unique(pc.list_parent_indices(turns).filter(has_words))
            found += reversed(table["row"].take(places).to_pylist())
    return found


def read_tokenizer(run_dir: Path) -> "Tokenizer | None":
    """The tokenizer of a run; None where there is none that can be read."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(run_dir / TOKENIZER))
    except Exception:  # its only type of error
        return None


def _tables(
    files: Sequence[SamplesFile], columns: Sequence[str] | None = None, only: Sequence[tuple[str, str, Any]] = ()
) -> Iterator["pa.Table"]:
    import pyarrow.parquet as pq

    for file in files:
        with _reading(file.path):
            found = pq.read_schema(file.path)
        with _reading(file.path, found):
            table = pq.read_table(
                file.path,
                columns=None if columns is None else list(columns),
                filters=list(only) or None,
                partitioning=None,
                schema=schema(),
            )
        yield table


@contextmanager
def _reading(path: Path, found: "pa.Schema | None" = None) -> Iterator[None]:
    """Raise ``CheckpointError`` for a file that is damaged, or whose columns, if given, are not ours. Those it lacks are read as null."""
    import pyarrow as pa

    if found is not None and not (
        "row" in found.names and _has_only(pa.struct(list(found)), pa.struct(list(schema())))
    ):
        fields = [field for field in found if field not in list(schema())] or list(found)
        raise CheckpointError(
            f"{path} was written by another version of skyrl_async, or is no file of samples: it has "
            f"{', '.join(f'{field.name} ({field.type})' for field in fields)}; read it with that version, or with pandas"
        )
    try:
        yield
    except (pa.ArrowException, EOFError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; take the file out") from error


def _has_only(found: "pa.DataType", known: "pa.DataType") -> bool:
    """Whether all fields of a type are known ones."""
    import pyarrow as pa

    if pa.types.is_list(found) and pa.types.is_list(known):
        return _has_only(found.value_type, known.value_type)
    if pa.types.is_struct(found) and pa.types.is_struct(known):
        return all(
            known.get_field_index(field.name) >= 0 and _has_only(field.type, known.field(field.name).type)
            for field in found
        )
    return bool(found.equals(known))


def write(file: SamplesFile, tables: Iterator["pa.Table"]) -> None:
    """Write a file of tables, one in memory at a time. Raises ``OSError``; nothing is left then."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file.path.parent.mkdir(parents=True, exist_ok=True)
    encoding = _PART_ENCODING if file.kind == ".part" else _ENCODING
    with _replacing(file.path) as path, pq.ParquetWriter(path, schema(), **encoding) as writer:
        waiting: list[pa.Table] = []
        for table in tables:
            waiting.append(table)
            if sum(table.nbytes for table in waiting) >= _ROW_GROUP_BYTES:
                writer.write_table(pa.concat_tables(waiting))
                waiting.clear()
        if waiting:
            writer.write_table(pa.concat_tables(waiting))


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    writing = path.with_name(f".{path.stem}{_WRITING}")  # pandas opens every file whose name does not begin with a dot
    try:
        yield writing
        sync(writing)
        writing.replace(path)
    except BaseException:
        writing.unlink(missing_ok=True)
        raise


def join(files: Sequence[SamplesFile]) -> SamplesFile:
    """Put adjoining files into one."""
    joined = file_of(files[0].path.parent, files[0].first, files[-1].end)
    _replace(files, joined, lambda table: table)
    return joined


def without_texts(file: SamplesFile) -> SamplesFile:
    """Replace a file by one with its figures alone."""
    figures = file_of(file.path.parent, file.first, file.end, ".figures")

    def figures_of(table: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        for name in LONG_COLUMNS:
            place = table.schema.get_field_index(name)
            table = table.set_column(place, schema().field(name), pa.nulls(len(table), schema().field(name).type))
        return table

    _replace([file], figures, figures_of)
    return figures


@dataclass(frozen=True, slots=True)
class Known:
    """The rows that a resumed run keeps."""

    num_rows: int = 0
    """Rows of training, by their numbers."""
    evaluated_version: int = -1
    """Rows of evaluations, up to the one of this policy version. The others are evaluated again."""

    def numbers_in(self, file: SamplesFile) -> "pa.Array":
        """Numbers of the rows that are kept."""
        import pyarrow.compute as pc

        (table,) = _tables([file], ["row", "step", "admission_index"])
        is_evaluated = pc.less_equal(table["step"], self.evaluated_version)
        is_trained = pc.less(table["row"], self.num_rows)
        is_kept = pc.if_else(pc.is_null(table["admission_index"]), is_evaluated, is_trained)
        return table["row"].filter(is_kept).combine_chunks()

    def end_in(self, directory: Path) -> int:
        """The number after the last row that is kept."""
        ends = (numbers[-1].as_py() + 1 for file in files_in(directory) if len(numbers := self.numbers_in(file)))
        return max((self.num_rows, *ends))


def cut(directory: Path, known: Known) -> list[SamplesFile]:
    """Keep the known rows, and nothing that a killed run left half done; returns the files."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not directory.is_dir():
        return []
    for left in directory.glob(f"*{_WRITING}"):
        left.unlink()
    files = files_in(directory)
    for path in set(directory.glob("*.parquet")) - {file.path for file in files}:
        if _NAME.fullmatch(path.name):
            path.unlink()
    for file in files:
        numbers = known.numbers_in(file)
        if not len(numbers):
            file.path.unlink()
        elif len(numbers) < file.num_rows:
            kept = file_of(directory, file.first, numbers[-1].as_py() + 1, file.kind)
            is_kept = pc.field("row").isin(numbers)
            _replace([file], kept, partial(pa.Table.filter, mask=is_kept))
    return files_in(directory)


def _replace(files: Sequence[SamplesFile], new: SamplesFile, change: Callable[["pa.Table"], "pa.Table"]) -> None:
    write(new, map(change, _tables(files)))
    for file in files:
        if file != new:
            os.unlink(file.path)
