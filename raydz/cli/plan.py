"""The table, the words and the JSON of `raydz plan`.

Neighbours: `main.py` calls `collect` and one of the others; `raydz.plan` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raydz.config import Config
from raydz.plan import Outline, Plan, advise, decoder_planner, offload_asked, with_outline
from raydz.units import format_count

_STAGES = (0, 1, 2, 3)
_DOUBLINGS = 3
_WIDTH = 160
_SNAPSHOT = "snapshot is host memory beside total, for saves behind training (checkpoint.async_save: false needs none)"


@dataclass(frozen=True)
class Findings:
    """Every stage on each number of ranks, and what to make of it.

    Args:
        asked: the plan of the configuration itself, on the first number of ranks.
    """

    asked: Plan
    plans: Sequence[Plan]
    advice: Sequence[str]
    offload: dict[str, str]


def collect(
    config: Config, outline: Outline, ranks: Sequence[int] | None, device: str, memory_bytes: int | None
) -> Findings:
    """Plan each stage on each number of ranks.

    Args:
        ranks: None is those of the configuration, doubled twice.

    Raises:
        ConfigError: nothing describes the model, or sizes do not fit together.
    """
    config = with_outline(config, outline)
    planner = decoder_planner(config, device)
    counts = list(ranks) if ranks else [_own_ranks(config) << i for i in range(_DOUBLINGS)]
    plans = [planner.at(count, stage=stage) for count in counts for stage in _STAGES]
    advice = advise(planner, counts[0], memory_bytes)
    return Findings(planner.at(counts[0]), plans, advice, offload_asked(config))


def _own_ranks(config: Config) -> int:
    """Ranks on which the three batch sizes close where all are given, else the workers that Ray is asked for."""
    rows, micro, accumulation = (
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps,
    )  # fmt: skip
    if rows and micro and accumulation and rows % (micro * accumulation) == 0:
        return rows // (micro * accumulation)
    return config.scaling.max_workers


def as_json(findings: Findings) -> dict[str, Any]:
    """Plain values."""
    return {
        "asked": findings.asked.as_json(),
        "plans": [plan.as_json() for plan in findings.plans],
        "advice": list(findings.advice),
        "offload": dict(findings.offload),
    }


def print_findings(findings: Findings) -> None:
    """A table of bytes a rank, then the recommendation."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, _WIDTH)  # a folded table is useless; a pipe has no width of its own
    console.print(_table(findings))
    for count, note in {plan.ranks: plan.note for plan in findings.plans}.items():
        if note:
            console.print(f"{count} ranks: {note}", soft_wrap=True)
    console.print("activations and logits are estimates; total counts all parts at once", soft_wrap=True)
    if findings.asked.snapshot_bytes:
        console.print(_SNAPSHOT, soft_wrap=True)
    for line in findings.advice:
        console.print(f"- {line}", soft_wrap=True)


def _table(findings: Findings) -> Any:
    from rich.table import Table

    asked, largest = findings.asked, max(plan.memory.total for plan in findings.plans)
    unit, factor = ("GiB", 1 << 30) if largest >= 1 << 30 else ("MiB", 1 << 20)
    table = Table(title=_title(asked, unit), title_justify="left", pad_edge=False)
    names = [name for name in asked.memory.parts() if any(plan.memory.parts()[name] for plan in findings.plans)]
    offload = ["host", "disk"] if findings.offload else []
    snapshot = ["snapshot"] if asked.snapshot_bytes else []
    for name in ("ranks", "stage", *names, "states", "total", *snapshot, "sent/step", *offload):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in findings.plans:
        parts = plan.memory.parts()
        figures = [*(parts[name] for name in names), plan.memory.model_states, plan.memory.total]
        figures += [plan.snapshot_bytes] * len(snapshot) + [plan.traffic.total]
        figures += [plan.offloaded.host, plan.offloaded.disk] if offload else []
        cells = [_figure(value / factor) for value in figures]
        is_asked = (plan.stage, plan.ranks) == (asked.stage, asked.ranks)
        table.add_row(str(plan.ranks), str(plan.stage), *cells, style="bold" if is_asked else "")
        if plan.stage == _STAGES[-1]:
            table.add_section()
    return table


def _figure(value: float) -> str:
    return "-" if not value else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _title(plan: Plan, unit: str) -> str:
    batch = plan.batch
    cut = f"{batch.global_batch} rows a step = {batch.micro_batch} * {batch.accumulation} * {plan.ranks} ranks"
    return f"{format_count(plan.num_params)} parameters, {unit} a rank by ZeRO stage; {cut}"
