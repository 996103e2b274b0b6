"""How the commands look in a terminal; plain lines in a pipe. Rich is imported when something is printed.

Neighbours: `main.py` calls these with what `report.py` and `checkpoint.py` found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raydz.cli.finding import Finding
from raydz.units import format_bytes, format_count

if TYPE_CHECKING:
    from raydz.cli.checkpoint import Listing

_STYLES = {"ok": "green", "absent": "dim", "odd": "yellow", "broken": "bold red"}
_NAME_WIDTH = 18


def print_findings(findings: Sequence[Finding], closing: str) -> None:
    """A line each, the remedy of what is wrong below it, and how many are."""
    from rich.text import Text

    for finding in findings:
        style = _STYLES[finding.state]
        _line(Text.assemble((f"{finding.state:<7}", style), f" {finding.name:<{_NAME_WIDTH}} {finding.detail}"))
        if finding.remedy:
            _line(Text.assemble(f"{'':<7} {'':<{_NAME_WIDTH}} -> ", (finding.remedy, style)))
    _line(closing)


def print_listing(uri: str, listing: Listing) -> None:
    """A line for each checkpoint, and what is not committed."""
    from rich.text import Text

    width = max([len(item.folder) for item in listing.committed], default=0)
    for item in listing.committed:
        if item.fault:
            _line(Text.assemble(f"{item.folder:<{width}}  ", (item.fault, _STYLES["broken"])))
            continue
        found = item.summary
        _line(
            f"{item.folder:<{width}}  step {found['step']:>8}  {found['saved']}  {found['world_size']:>4} ranks  "
            f"{found['tensors']:>5} tensors  {format_bytes(found['bytes']):>10}"
        )
    if listing.uncommitted:
        _line(f"not committed (a save that runs, or one that was interrupted): {', '.join(listing.uncommitted)}")
    _line(f"{len(listing.committed)} committed under {uri}")


def print_checkpoint(found: dict[str, Any]) -> None:
    """One checkpoint, a fact a line."""
    figures = {
        "checkpoint": found["uri"],
        "step": found["step"],
        "saved": f"{found['saved']} by raydz {found['raydz_version']} on {found['world_size']} ranks",
        "size": f"{format_bytes(found['bytes'])} in {len(found['files'])} files",
        "tensors": found["tensors"],
        **{
            f"  {kind}": f"{count['tensors']} tensors, {format_count(count['elements'])} elements"
            for kind, count in found["kinds"].items()
        },
        "tied": ", ".join(f"{alias} = {name}" for alias, name in found["tied"].items()) or "none",
        "state": ", ".join(found["state"]) or "none",
    }
    for name, value in figures.items():
        _line(f"{name:<{_NAME_WIDTH}} {value}")


def _line(text: Any) -> None:
    from rich.console import Console

    # A line of output stays a line: soft_wrap leaves the folding to the terminal, so that grep finds whole ones.
    Console(highlight=False, markup=False, emoji=False).print(text, soft_wrap=True)
