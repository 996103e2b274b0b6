"""Which files a source path means, and how to open them: one file, a folder, a glob; local, `s3://` or `sample:`.

Layer 4, first on the path files -> readers -> source -> tokenizer -> tokens. Credentials for S3 come only
from the environment, the AWS profile files or the instance (pyarrow's default chain), never from an argument.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import pyarrow as pa
from pyarrow import fs

from raydz.errors import ConfigError, DataError
from raydz.log import get

_log = get(__name__)

SAMPLES = {"wordnet": "wordnet_glosses.txt"}
FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_COMPRESSED = {".gz", ".bz2", ".zst", ".lz4"}
_WANTED_NAMES = (
    f"a name that ends in {', '.join(FORMATS)}; text and JSON lines also with {', '.join(sorted(_COMPRESSED))}"
)


@dataclass(frozen=True)
class SourceFile:
    """One file of a source, found but not opened.

    `uri` is how people call it, `path` how `filesystem` does. `format` is text, jsonl, parquet or arrow.
    """

    filesystem: fs.FileSystem
    path: str
    uri: str
    format: str
    size: int
    version: str

    def open_stream(self) -> pa.NativeFile:
        """Open for one pass from the start; `.gz` and its kin are decompressed on the way."""
        return self.filesystem.open_input_stream(self.path)

    def open_random(self) -> pa.NativeFile:
        """Open for reads at any offset (parquet, arrow)."""
        return self.filesystem.open_input_file(self.path)


@contextlib.contextmanager
def reading(uri: str) -> Iterator[None]:
    """Turn what pyarrow and the file system raise inside into a DataError that names `uri`."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError("the source does not exist", where=uri, remedy="check the path") from error
    except (OSError, pa.ArrowException) as error:
        remedy = "check the bucket, the endpoint and the AWS_* credentials" if uri.startswith("s3://") else None
        raise DataError("the source cannot be read", where=uri, got=_first_line(error), remedy=remedy) from error


def list_files(path: str, endpoint_url: str | None = None, region: str | None = None) -> list[SourceFile]:
    """Resolve `path` to its files, sorted by path, so that every process sees the same order.

    In folders and globs, names that begin with `.` or `_` and names of no known format are left out (and logged).

    Raises:
        ConfigError: unknown scheme or sample.
        DataError: nothing there, an empty file, no file of a known format, or the store refuses.
    """
    if path.startswith("sample:"):
        return [_sample(path)]
    filesystem, root, prefix = _open_filesystem(path, endpoint_url, region)
    with reading(path):
        infos, is_named = _list(filesystem, root)
    known = [info for info in infos if _format(info.path) is not None]
    if not known:
        found = ", ".join(os.path.basename(info.path) for info in infos[:5]) or "no file"
        raise DataError("the source holds no file that can be read", where=path, got=found, wanted=_WANTED_NAMES)
    if len(known) < len(infos):
        _log.info("%s: %d files of other formats left out", path, len(infos) - len(known))
    files = [_describe(filesystem, info, path if is_named else prefix + info.path) for info in known]
    for file in files:
        if file.size == 0:
            raise DataError("the file is empty", where=file.uri, got="0 bytes", remedy="remove it or write it again")
    return files


def _sample(path: str) -> SourceFile:
    name = path.removeprefix("sample:")
    if name not in SAMPLES:
        raise ConfigError("unknown sample", where=path, got=name, wanted=", ".join(f"sample:{s}" for s in SAMPLES))
    file = str(resources.files("raydz.data") / "sample" / SAMPLES[name])
    with reading(path), open(file, "rb") as stream:
        content = stream.read()
    # Installation times differ from node to node, the content does not.
    return SourceFile(fs.LocalFileSystem(), file, path, "text", len(content), hashlib.sha256(content).hexdigest())


def _open_filesystem(path: str, endpoint_url: str | None, region: str | None) -> tuple[fs.FileSystem, str, str]:
    scheme, separator, rest = path.partition("://")
    if not separator or scheme == "file":
        return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(rest if separator else path)), ""
    if scheme != "s3":
        raise ConfigError("unknown kind of source", where=path, got=scheme, wanted="a local path, s3:// or sample:")
    options: dict[str, Any] = {}
    if region or endpoint_url:
        options["region"] = region or "us-east-1"
    if endpoint_url:
        url_scheme, has_scheme, address = endpoint_url.rstrip("/").partition("://")
        options |= (
            {"endpoint_override": address, "scheme": url_scheme} if has_scheme else {"endpoint_override": endpoint_url}
        )
    with reading(path):
        return fs.S3FileSystem(**options), rest.rstrip("/"), "s3://"


def _list(filesystem: fs.FileSystem, root: str) -> tuple[list[fs.FileInfo], bool]:
    """All files below `root` or matching it, and whether `root` itself is the file."""
    info = filesystem.get_file_info(root)
    if info.type == fs.FileType.File:
        return [info], True
    if info.type == fs.FileType.Directory:
        return _walk(filesystem, root), False
    wildcard = re.search(r"[*?\[]", root)
    if wildcard is None:
        raise FileNotFoundError(root)
    base = root[: wildcard.start()].rpartition("/")[0] or "/"
    matches = re.compile(_glob_pattern(root))
    return [found for found in _walk(filesystem, base) if matches.fullmatch(found.path)], False


def _walk(filesystem: fs.FileSystem, base: str) -> list[fs.FileInfo]:
    infos = filesystem.get_file_info(fs.FileSelector(base, recursive=True))
    files = [info for info in infos if info.type == fs.FileType.File]
    visible = [info for info in files if not re.search(r"(^|/)[._]", info.path[len(base) :])]
    return sorted(visible, key=lambda info: info.path)


def _glob_pattern(glob: str) -> str:
    """`*` and `?` stay inside one folder, `**/` crosses folders, `[a-c]` is a set, as in a shell."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]/]+\])", glob)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(meaning.get(p) or (p.replace("[!", "[^") if p.startswith("[") else re.escape(p)) for p in parts)


def _format(path: str) -> str | None:
    stem, extension = os.path.splitext(path.lower())
    if extension not in _COMPRESSED:
        return FORMATS.get(extension)
    inner = FORMATS.get(os.path.splitext(stem)[1])
    return inner if inner in ("text", "jsonl") else None


def _describe(filesystem: fs.FileSystem, info: fs.FileInfo, uri: str) -> SourceFile:
    return SourceFile(filesystem, info.path, uri, str(_format(info.path)), info.size, str(info.mtime_ns))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
