"""Rows of one file, streamed: (row number counted from 1, {column: value}); memory is bounded by one batch.

Layer 4, between files (which files) and source (which documents). JSON lines are parsed one by one with `json`, not by
pyarrow's reader: see the note "Why not pyarrow.json" in README.md.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import ipc
from pyarrow import parquet as pq

from raydz.data.files import SourceFile, reading
from raydz.errors import DataError

Row = tuple[int, dict[str, Any]]

_BUFFER_BYTES = 1 << 20
_BATCH_ROWS = 1024


def read_rows(file: SourceFile, columns: Sequence[str], split: str) -> Iterator[Row]:
    """Stream the rows of `file` with just `columns`; text files have the one column that is asked for.

    Raises:
        DataError: unreadable, damaged, not UTF-8, not JSON, a column is missing; names file and line or row.
    """
    if file.format == "text":
        return ((number, {columns[0]: text}) for number, text in _read_text(file, split))
    readers: dict[str, Callable[[SourceFile, Sequence[str]], Iterator[Row]]] = {
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
    }
    return readers[file.format](file, columns)


def _read_lines(file: SourceFile) -> Iterator[tuple[int, str]]:
    with reading(file.uri), file.open_stream() as raw, io.BufferedReader(raw, _BUFFER_BYTES) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    "the text is not valid UTF-8",
                    where=f"{file.uri}, line {number}",
                    got=f"byte 0x{line[error.start]:02x} at column {error.start + 1}",
                    remedy="convert the file to UTF-8",
                ) from error
            yield number, text.rstrip("\r\n")


def _read_text(file: SourceFile, split: str) -> Iterator[tuple[int, str]]:
    """`lines`: each line; `blank_lines`: paragraphs between blank lines; `file`: all of it. Numbered by first line."""
    if split == "lines":
        yield from _read_lines(file)
        return
    paragraph: list[str] = []
    first = 1
    for number, line in _read_lines(file):
        if split == "blank_lines" and not line.strip():
            yield first, "\n".join(paragraph)
            paragraph, first = [], number + 1
        else:
            paragraph.append(line)
    yield first, "\n".join(paragraph)


def _read_jsonl(file: SourceFile, columns: Sequence[str]) -> Iterator[Row]:
    for number, line in _read_lines(file):
        if not line.strip():
            continue
        where = f"{file.uri}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                "the line is not JSON", where=where, got=str(error), wanted="one JSON object a line"
            ) from error
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise DataError("the line is not a JSON object", where=where, got=kind, wanted="one JSON object a line")
        _check_columns(columns, list(record), where)
        yield number, {name: record[name] for name in columns}


def _read_parquet(file: SourceFile, columns: Sequence[str]) -> Iterator[Row]:
    with reading(file.uri), file.open_random() as stream, pq.ParquetFile(stream) as table:
        _check_columns(columns, table.schema_arrow.names, file.uri)
        yield from _rows(table.iter_batches(_BATCH_ROWS, columns=list(columns)), file.uri)


def _read_arrow(file: SourceFile, columns: Sequence[str]) -> Iterator[Row]:
    with reading(file.uri), file.open_random() as stream:
        # Both IPC layouts are called .arrow; only the random-access one begins with this magic.
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        reader = ipc.open_file(stream) if is_file else ipc.open_stream(stream)
        _check_columns(columns, reader.schema.names, file.uri)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
        yield from _rows((batch.select(list(columns)) for batch in batches), file.uri)


def _rows(batches: Iterator[pa.RecordBatch], uri: str) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            for record in _to_python(batch.slice(start, _BATCH_ROWS), uri, number):
                number += 1
                yield number, record


def _to_python(batch: pa.RecordBatch, uri: str, rows_before: int) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        for i in range(batch.num_rows):
            _check_row(batch.slice(i, 1), f"{uri}, row {rows_before + i + 1}")
        raise AssertionError("a batch failed to decode but each of its rows did not") from error


def _check_row(row: pa.RecordBatch, where: str) -> None:
    try:
        row.to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(
            "the text is not valid UTF-8", where=where, got=str(error), remedy="write the column as UTF-8"
        ) from error


def _check_columns(wanted: Sequence[str], present: Sequence[str], where: str) -> None:
    missing = [name for name in wanted if name not in present]
    if missing:
        raise DataError(
            f"column {', '.join(map(repr, missing))} is missing",
            where=where,
            got=", ".join(present) or "no column",
            wanted=", ".join(wanted),
            remedy="set the source's column to one that exists",
        )
