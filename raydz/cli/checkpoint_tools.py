"""What the commands that read data, compare, copy and remove find out, as values that JSON can hold, and as lines.

Neighbours: `checkpoint_commands.py` prints them; `raydz.checkpoint` does the work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from raydz.checkpoint import Manifest, checkpoint_uri, open_checkpoint
from raydz.checkpoint.compare import Side, compare
from raydz.checkpoint.copy import Place, copy_checkpoint
from raydz.checkpoint.find import join_key
from raydz.checkpoint.retention import Best, Rules
from raydz.checkpoint.sweep import Sweeper, SweepPlan, Swept
from raydz.checkpoint.verify import verify_checkpoint
from raydz.cli.checkpoint import checkpoint_folders, list_checkpoints
from raydz.cli.progress import bytes_bar
from raydz.errors import ConfigError
from raydz.storage import Store
from raydz.units import format_bytes

Found = dict[str, Any]


# -- verify ------------------------------------------------------------------------------------------------------------


def verify(store: Store, every: bool, *, quick: bool, threads: int) -> list[Found]:
    """The newest checkpoint or all of them, each with its damage.

    Raises:
        CheckpointError: there is none, or the newest one's manifest is damaged.
    """
    if not every:
        folder, manifest = open_checkpoint(store)
        return [_verify_one(store, folder, manifest, quick, threads)]
    return [_verify_listed(store, item, quick, threads) for item in list_checkpoints(store).committed]


def _verify_listed(store: Store, item: Any, quick: bool, threads: int) -> Found:
    if item.fault is None:
        return _verify_one(store, *open_checkpoint(store, item.folder), quick, threads)
    damage = {"file": "manifest.json", "what": f"cannot be used: {item.fault}", "chunks": []}
    return {"uri": checkpoint_uri(store, item.folder), "damage": [damage]}


def _verify_one(store: Store, folder: str, manifest: Manifest, quick: bool, threads: int) -> Found:
    total, started = sum(data_file.bytes for data_file in manifest.files), time.perf_counter()
    with bytes_bar(total) as done:
        damage = verify_checkpoint(store, folder, manifest, quick=quick, threads=threads, done=done)
    return {
        "uri": checkpoint_uri(store, folder), "step": manifest.step, "files": len(manifest.files), "bytes": total,
        "quick": quick, "seconds": round(time.perf_counter() - started, 3),
        "damage": [{**asdict(item), "chunks": list(item.chunks)} for item in damage],
    }  # fmt: skip


def verified_lines(found: Found) -> Iterator[str]:
    """One line for a whole checkpoint; for a damaged one, one for each file with the first chunks."""
    if not found["damage"]:
        looked = "all there in full size" if found["quick"] else "every checksum fits"
        rate = format_bytes(found["bytes"] / max(found["seconds"], 1e-3))
        figures = f"{found['files']} files, {format_bytes(found['bytes'])}"
        yield f"whole     {found['uri']}: {looked} ({figures}" + (")" if found["quick"] else f", {rate}/s)")
    for item in found["damage"]:
        chunks = ", ".join(map(str, item["chunks"][:8])) + (", …" if len(item["chunks"]) > 8 else "")
        yield f"damaged   {found['uri']}: {item['file']} {item['what']}" + (f": {chunks}" if chunks else "")


# -- diff --------------------------------------------------------------------------------------------------------------


def compare_stores(a: Store, b: Store, patterns: tuple[str, ...]) -> Found:
    """Both newest checkpoints and what differs."""
    sides = [Side(store, *open_checkpoint(store)) for store in (a, b)]
    total = sum(data_file.bytes for side in sides for data_file in side.manifest.files)
    with bytes_bar(total) as done:
        found = compare(sides[0], sides[1], patterns, done)
    heads = [
        {"uri": checkpoint_uri(s.store, s.folder), "step": s.manifest.step, "world_size": s.manifest.world_size}
        for s in sides
    ]
    return {
        "a": heads[0], "b": heads[1], "tensors": found.num_tensors, "state": found.state,
        "differences": [asdict(item) for item in found.differences],
    }  # fmt: skip


def difference_lines(found: Found) -> Iterator[str]:
    """Both sides, a line for each tensor that differs, and how many do."""
    for side in ("a", "b"):
        head = found[side]
        yield f"{side.upper()}  {head['uri']}: step {head['step']}, {head['world_size']} ranks"
    for item in found["differences"]:
        yield f"{item['what']:<10} {item['kind']}/{item['name']}  {_how(item)}"
    differing = f"{len(found['differences'])} of {found['tensors']} tensors differ"
    yield differing + (f"; beside them: {', '.join(found['state'])}" if found["state"] else "")


def _how(item: Found) -> str:
    if item["what"] in ("only in A", "only in B"):
        return item["a"] or item["b"]
    shown = item["a"] if item["a"] == item["b"] else f"{item['a']} | {item['b']}"
    if item["what"] == "shape":
        return shown
    return f"{shown}  {item['num_different']} of {item['num_elements']} elements, max |Δ| {item['max_abs']:.3g}"


# -- gc ----------------------------------------------------------------------------------------------------------------


def rules_of(keep_last: int | None, keep_every: int, keep_best: str | None) -> Rules:
    """The rules that the options give.

    Raises:
        ConfigError: rules without --keep-last, or `METRIC:mode:count` that is none.
    """
    if keep_last is None and (keep_every or keep_best):
        raise ConfigError(
            "all checkpoints are kept without --keep-last", where="--keep-every, --keep-best",
            remedy="say how many of the newest to keep besides",
        )  # fmt: skip
    if keep_best is None:
        return Rules(keep_last, keep_every)
    metric, mode, count = (*keep_best.split(":", 2), "", "")[:3]
    mode, count = mode or "min", count or "1"
    if mode not in ("min", "max") or not count.isdigit() or not metric:
        raise ConfigError("not a rule", where="--keep-best", got=keep_best, wanted="for example eval_loss:min:2")
    return Rules(keep_last, keep_every, Best(metric, "max" if mode == "max" else "min", int(count)))


def collect_garbage(store: Store, rules: Rules, older_than_s: float, *, delete: bool) -> Found:
    """What would be removed from every folder of checkpoints at or below the store's root, or what was."""
    found: Found = {
        "uri": store.uri, "deleted": delete, "checkpoints": [], "orphans": [], "leftovers": 0, "bytes": 0,
        "damaged": [], "faults": [],
    }  # fmt: skip
    for folder in checkpoint_folders(store):
        sweeper = Sweeper(store, rules, folder=folder, sweep_after_s=older_than_s)
        plan = sweeper.plan()
        found["damaged"] += [f"{checkpoint_uri(store, item.folder)}: {item.fault}" for item in plan.damaged]
        swept = sweeper.run(plan) if delete else _as_if_swept(plan)
        found["checkpoints"] += [checkpoint_uri(store, name) for name in swept.checkpoints]
        found["orphans"] += [checkpoint_uri(store, name) for name in swept.orphans]
        found["leftovers"] += swept.num_leftovers
        found["bytes"] += swept.num_bytes
        found["faults"] += swept.faults
    return found


def _as_if_swept(plan: SweepPlan) -> Swept:
    orphans = [join_key(orphan.folder, orphan.attempt) for orphan in plan.orphans]
    return Swept([item.folder for item in plan.surplus], orphans, 0, plan.num_bytes)


def garbage_lines(found: Found) -> Iterator[str]:
    """A line for each thing, and what they come to."""
    yield from (f"checkpoint     {uri}" for uri in found["checkpoints"])
    yield from (f"not committed  {uri}" for uri in found["orphans"])
    yield from (f"damaged, left  {text}" for text in found["damaged"])
    yield from (f"not removed    {text}" for text in found["faults"])
    count = len(found["checkpoints"]) + len(found["orphans"])
    if found["deleted"]:
        rest = f" and {found['leftovers']} unfinished files or uploads" if found["leftovers"] else ""
        yield f"removed {count} with {format_bytes(found['bytes'])}{rest}"
    else:
        yield f"{count} with {format_bytes(found['bytes'])} could be removed: --delete does, unfinished uploads too"


# -- cp ----------------------------------------------------------------------------------------------------------------


def target_of(source: Store, dst: str) -> tuple[str, str]:
    """The checkpoint's folder in the source, and its URI at the destination."""
    folder, _ = open_checkpoint(source)
    name = checkpoint_uri(source, folder).rpartition("/")[2]
    return folder, f"{dst}{name}" if dst.endswith("/") else dst


def copy(source: Store, folder: str, target: Store, threads: int) -> Found:
    """Copy, and say what was done."""
    _, manifest = open_checkpoint(source, folder)
    total, started = sum(data_file.bytes for data_file in manifest.files), time.perf_counter()
    with bytes_bar(total) as done:
        copied = copy_checkpoint(Place(source, folder), Place(target), threads=threads, done=done)
    return {
        "uri": copied.uri, "step": manifest.step, "bytes": copied.num_bytes, "copied": copied.num_copied,
        "kept": copied.num_kept, "seconds": round(time.perf_counter() - started, 3),
    }  # fmt: skip


def copied_line(found: Found) -> str:
    """What was done."""
    kept = f", {found['kept']} were there" if found["kept"] else ""
    figures = f"{found['copied']} files copied{kept}, {format_bytes(found['bytes'])} in {found['seconds']:.1f} s"
    return f"{found['uri']}: step {found['step']}, {figures}"
