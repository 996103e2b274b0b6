"""The command `raydz`: one function a command, each of them parse, call, print.

Neighbours: `report.py` and `raydz.config` do the work, `printing.py` the looks; `checkpoint_commands.py` and
`convert.py` have commands of their own. What takes seconds to import is imported inside the command that needs it, so
that `raydz --help` answers at once.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from raydz import log
from raydz.cli.arguments import PLAIN, Endpoint, Json
from raydz.cli.checkpoint_commands import checkpoints
from raydz.cli.convert import convert
from raydz.cli.submit import PASS_ON, submit
from raydz.errors import RaydzError
from raydz.version import __version__


class TypedErrors(TyperGroup):
    """A group of commands whose typed errors end in a message and exit code 1, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RaydzError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(1) from None


app = typer.Typer(cls=TypedErrors, help="raydz: ZeRO-sharded training on Ray.", **PLAIN)
app.add_typer(checkpoints, name="checkpoint")
app.command()(convert)
app.command(context_settings=PASS_ON)(submit)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"raydz {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Called before every command."""
    log.setup()


@app.command()
def report(
    s3: Annotated[str | None, typer.Option(metavar="URI", help="Write, read and delete an object below this.")] = None,
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Say what is installed, what this machine has, and what is wrong with it.

    Exit code 0, whatever was found; 1 if --s3 was given and that place cannot be used.
    """
    from raydz.cli import printing
    from raydz.cli import report as collected

    findings = collected.collect(s3, endpoint_url)
    if as_json:
        print(json.dumps(collected.as_json(findings), indent=1))
    else:
        printing.print_findings(findings, collected.closing_line(findings))
    if s3 is not None and any(finding.name == "s3" and finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


@app.command()
def config(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML or JSON of a run.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks for the batch sizes [default: scaling.num_workers].")] = None,
) -> None:
    """Print the resolved configuration of a run, and how its batch is cut; it loads as a file again."""
    from raydz.config import load

    found = load(file, overrides or ())
    print(found.to_yaml(), end="")
    world_size = found.scaling.max_workers if ranks is None else ranks
    batch = found.batch(world_size)
    sign = "=" if batch.micro_batch * batch.accumulation * world_size == batch.global_batch else "<"  # cut unevenly
    print(
        f"# {world_size} ranks: train_batch_size {batch.global_batch} {sign} train_micro_batch_size_per_gpu "
        f"{batch.micro_batch} * gradient_accumulation_steps {batch.accumulation} * {world_size}"
    )


@app.command()
def plan(
    file: Annotated[str, typer.Option("--config", metavar="FILE", help="YAML or JSON of a run, or of DeepSpeed.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
    ranks: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of ranks [default: the file's].")] = None,
    params: Annotated[float | None, typer.Option(min=1, help="Parameters, such as 7e9.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key-value heads.")] = None,
    intermediate: Annotated[int | None, typer.Option(min=1, help="Width of the feed-forward parts.")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Vocabulary.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a rank's device: 80GiB.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: what kernels and collectives hold differs.")] = "cuda",
    as_json: Json = False,
) -> None:
    """Say what each ZeRO stage takes of a rank's memory and sends in a step, and which to choose."""
    from raydz.cli import plan as planned
    from raydz.config import load
    from raydz.errors import ConfigError
    from raydz.plan import Outline
    from raydz.units import parse_bytes

    if device not in ("cpu", "cuda"):
        raise ConfigError("unknown device", where="--device", got=device, wanted="cpu or cuda")
    outline = Outline(params, layers, hidden, heads, kv_heads, intermediate, vocab)
    memory_bytes = None if memory is None else parse_bytes(memory)
    findings = planned.collect(load(file, overrides or ()), outline, ranks, device, memory_bytes)
    if as_json:
        print(json.dumps(planned.as_json(findings), indent=1))
    else:
        planned.print_findings(findings)
