"""Options and arguments that several commands share. Neighbours: `main.py`, `checkpoint_commands.py`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

# Rich tracebacks would print local variables, credentials among them.
PLAIN: dict[str, Any] = {"no_args_is_help": True, "add_completion": False, "pretty_exceptions_enable": False}

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Endpoint = Annotated[str | None, typer.Option(help="S3 endpoint that is not AWS; else AWS_ENDPOINT_URL counts.")]
Uri = Annotated[str, typer.Argument(metavar="URI", help="Folder or s3://bucket/prefix.")]
