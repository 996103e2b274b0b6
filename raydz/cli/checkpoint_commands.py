"""`raydz checkpoint ls | show | verify | diff | gc | cp`: parse, call, print.

Neighbours: `main.py` registers the group; `checkpoint.py` looks at manifests, `checkpoint_tools.py` at data. torch
comes with either: they are imported inside the command, after its URIs were found to be some.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from raydz.cli.arguments import PLAIN, Endpoint, Json, Uri

if TYPE_CHECKING:
    from raydz.storage import Store

checkpoints = typer.Typer(help="Look at checkpoints, compare, copy and remove them.", **PLAIN)


@checkpoints.command("ls")
def list_checkpoints(uri: Uri, endpoint_url: Endpoint = None, as_json: Json = False) -> None:
    """List the committed checkpoints of a run, or of all runs in a folder."""
    store = _open(uri, endpoint_url)
    from raydz.cli import checkpoint, printing

    listing = checkpoint.list_checkpoints(store)
    if as_json:
        found = [{"folder": item.folder, **item.summary, "fault": item.fault} for item in listing.committed]
        print(json.dumps({"committed": found, "uncommitted": listing.uncommitted}, indent=1))
    else:
        printing.print_listing(store.uri, listing)


@checkpoints.command("show")
def show_checkpoint(uri: Uri, endpoint_url: Endpoint = None, as_json: Json = False) -> None:
    """Describe one checkpoint, or the newest one in a folder; its tensors are not read."""
    store = _open(uri, endpoint_url)
    from raydz.checkpoint import open_checkpoint
    from raydz.cli import checkpoint, printing

    folder, manifest = open_checkpoint(store)
    found = checkpoint.describe(store, folder, manifest)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        printing.print_checkpoint(found)


@checkpoints.command("verify")
def verify(
    uri: Uri,
    quick: Annotated[bool, typer.Option("--quick", help="Only see whether all files are there in full size.")] = False,
    every: Annotated[bool, typer.Option("--all", help="All checkpoints in the folder, not only the newest.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Reads at a time.")] = 8,
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Read a checkpoint whole and compare every checksum. Exit code 1, and names of files and chunks, on damage."""
    store = _open(uri, endpoint_url)
    from raydz.cli import checkpoint_tools as tools

    found = tools.verify(store, every, quick=quick, threads=threads)
    if as_json:
        print(json.dumps({"checkpoints": found}, indent=1))
    else:
        for item in found:
            print("\n".join(tools.verified_lines(item)))
    if any(item["damage"] for item in found):
        raise typer.Exit(1)


@checkpoints.command("diff")
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Folder or s3://bucket/prefix.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Folder or s3://bucket/prefix.")],
    only: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Names, or kind/name: weight/*")] = None,
    endpoint_url: Endpoint = None,
    b_endpoint_url: Annotated[str | None, typer.Option(help="S3 endpoint of B, where it differs.")] = None,
    as_json: Json = False,
) -> None:
    """Name the tensors in which two checkpoints differ, and by how much. Exit code 1 if there are any."""
    stores = _open(a, endpoint_url), _open(b, b_endpoint_url or endpoint_url)
    from raydz.cli import checkpoint_tools as tools

    found = tools.compare_stores(*stores, tuple(only or ()))
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(tools.difference_lines(found)))
    if found["differences"]:
        raise typer.Exit(1)


@checkpoints.command("gc")
def collect_garbage(
    uri: Uri,
    older_than: Annotated[str, typer.Option(metavar="AGE", help="Of saves never committed: 36h, 2d.")] = "1d",
    keep_last: Annotated[int | None, typer.Option(min=1, help="Also remove checkpoints but so many newest.")] = None,
    keep_every: Annotated[int, typer.Option(min=0, help="With --keep-last: keep multiples of this step.")] = 0,
    keep_best: Annotated[str | None, typer.Option(metavar="METRIC[:min|max[:N]]", help="Keep the best, too.")] = None,
    delete: Annotated[bool, typer.Option("--delete/--dry-run", help="Remove; else only say what would be.")] = False,
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Say what could be removed from a run, or from each run in a folder, and how many bytes; --delete removes it.

    Files of saves that were never committed, by age; with --keep-last also checkpoints. Never the newest whole one.
    The age must be longer than any save takes, and nothing that is removed may be read meanwhile (a resume, an export).
    """
    store = _open(uri, endpoint_url)
    from raydz.cli import checkpoint_tools as tools
    from raydz.units import parse_seconds

    rules = tools.rules_of(keep_last, keep_every, keep_best)
    found = tools.collect_garbage(store, rules, parse_seconds(older_than), delete=delete)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(tools.garbage_lines(found)))
    if found["faults"]:
        raise typer.Exit(1)


@checkpoints.command("cp")
def copy(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint, or a folder whose newest is taken.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="Its new place; with a slash at the end, below that.")],
    endpoint_url: Endpoint = None,
    to_endpoint_url: Annotated[str | None, typer.Option(help="S3 endpoint of DST, where it differs.")] = None,
    bandwidth_limit: Annotated[str | None, typer.Option(metavar="SIZE", help="Per second, to and from S3.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Reads at a time.")] = 8,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint between folders and buckets, every checksum compared, the manifest last.

    Killed in the middle, it is no checkpoint yet, and the same command goes on where it ended.
    """
    source = _open(src, endpoint_url, bandwidth_limit)
    _open(dst, to_endpoint_url or endpoint_url)  # a URI that is none is told before anything is read
    from raydz.cli import checkpoint_tools as tools

    folder, uri = tools.target_of(source, dst)
    found = tools.copy(source, folder, _open(uri, to_endpoint_url or endpoint_url, bandwidth_limit), threads)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print(tools.copied_line(found))


def _open(uri: str, endpoint_url: str | None, bandwidth_limit: str | None = None) -> Store:
    from raydz.storage import S3Options, open_store
    from raydz.units import parse_bytes

    limit = None if bandwidth_limit is None else float(parse_bytes(bandwidth_limit))
    return open_store(uri, S3Options(endpoint_url=endpoint_url, bandwidth_limit=limit))
