"""Documents and records of a source, one after the other, in an order that never changes.

Layer 4, between readers (rows of one file) and prepare (tokens of all documents). `raydz.config` maps its `data`
section onto `SourceSpec`; the RLHF stages read prompts and pairs with `iter_records`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from raydz.data.files import list_files
from raydz.data.readers import read_rows
from raydz.errors import ConfigError, DataError

Split = Literal["lines", "blank_lines", "file"]


@dataclass(frozen=True)
class SourceSpec:
    """Where documents come from.

    Args:
        path: a file, a folder or a glob (`*`, `?`, `[a-c]`, `**`), local or `s3://bucket/...`; or `sample:wordnet`.
        column: the column of parquet, arrow and JSON lines that holds the text.
        split: what one document of a `.txt` is: a line, what stands between blank lines, or the whole file.
        endpoint_url: an S3 store other than AWS, for example `http://127.0.0.1:8333`.
        region: of the S3 store.

    Raises:
        ConfigError: unknown `split`.
    """

    path: str
    column: str = "text"
    split: Split = "lines"
    endpoint_url: str | None = None
    region: str | None = None

    def __post_init__(self) -> None:
        if self.split not in get_args(Split):
            wanted = ", ".join(get_args(Split))
            raise ConfigError("unknown way to split text", where=self.path, got=self.split, wanted=wanted)


def iter_documents(source: SourceSpec) -> Iterator[str]:
    """The texts of `source`, streamed; blank ones are left out.

    Raises:
        DataError: nothing there, an empty file or one without a document, a missing column, a value that is not
            text, damaged input; names file and line or row.
    """
    for file in list_files(source.path, source.endpoint_url, source.region):
        num_documents = 0
        for number, row in read_rows(file, [source.column], source.split):
            text = row[source.column]
            _check_text(text, source.column, f"{file.uri}, row {number}")
            if text.strip():
                num_documents += 1
                yield text
        if num_documents == 0:
            raise DataError("the file holds no document", where=file.uri, got="only blank text")


def iter_records(source: SourceSpec, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of `source` with several columns (`messages`, or `prompt` + `chosen` + `rejected`), streamed.

    Raises:
        ConfigError: the source is a text file, which has no columns.
        DataError: as for `iter_documents`; values are not looked at.
    """
    for file in list_files(source.path, source.endpoint_url, source.region):
        if file.format == "text" and len(columns) != 1:
            wanted = "JSON lines, parquet or arrow"
            raise ConfigError("a text file has no columns", where=file.uri, got=", ".join(columns), wanted=wanted)
        num_records = 0
        for _, row in read_rows(file, columns, source.split):
            num_records += 1
            yield row
        if num_records == 0:
            raise DataError("the file holds no row", where=file.uri)


def _check_text(text: Any, column: str, where: str) -> None:
    if not isinstance(text, str):
        raise DataError(
            f"column {column!r} holds something that is not text",
            where=where,
            got=type(text).__name__,
            wanted="str",
            remedy="choose another column, or drop such rows",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair ("\ud83d"), which no UTF-8 can carry.
        remedy = "write the escape of the whole character"
        raise DataError("the text is not valid Unicode", where=where, got=error.reason, remedy=remedy) from error


def source_fingerprint(source: SourceSpec) -> list[Any]:
    """What must be equal for two reads to give the same documents: options, and each file's name, size and time.

    The sample's content stands for its time, so that all nodes agree on it. JSON-serialisable.
    """
    files = list_files(source.path, source.endpoint_url, source.region)
    return [source.column, source.split, source.endpoint_url, [[f.uri, f.size, f.version] for f in files]]
