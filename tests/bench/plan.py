"""`raydz plan` against measurement: bytes of model states that it names, and those of an engine's real tensors.

    python tests/bench/plan.py            # a table
    python tests/bench/plan.py --json     # one JSON line a case

Each case trains a step on gloo ranks and counts every tensor of the engine between backward and step, each storage
once. Cases: the demo as it stands, the 20.5M model at stages 1 to 3, and the article's DeepSpeed file on two ranks with
a small model, without its offload sections, which this release does not train with.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from raydz.config import Config, load  # noqa: E402
from raydz.plan import decoder_planner  # noqa: E402
from tests.plan.measuring import measure  # noqa: E402
from tests.support.ranks import RankPool  # noqa: E402

STATES = ("weights", "masters", "moments", "gradients", "sums")
TWENTY = {
    "hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "intermediate_size": 1024, "vocab_size": 8192,
}  # fmt: skip
SMALL = TWENTY | {"num_hidden_layers": 2, "vocab_size": 2048}


@dataclass(frozen=True)
class Case:
    variant: str
    config: Config


def cases(ranks: int) -> Iterator[Case]:
    yield Case("demo", load(ROOT / "jobs/configs/demo.yaml"))
    for stage in (1, 2, 3):
        config = load(
            {
                "model": TWENTY,
                "data": {"sequence_length": 128},
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": stage},
            }
        )
        yield Case(f"20m-stage{stage}", config)
    yield Case("article", load(article(ranks)))


def article(ranks: int) -> dict:
    """The article's sections, with the batch of these ranks and without offload."""
    given = deepcopy(json.loads((ROOT / "jobs/configs/article_zero3.json").read_text()))
    for part in ("offload_optimizer", "offload_param"):
        del given["zero_optimization"][part]
    given["train_micro_batch_size_per_gpu"] = 1
    given["gradient_accumulation_steps"] = 2
    given["train_batch_size"] = 2 * ranks
    return {**given, "model": SMALL, "data": {"sequence_length": 32}}


def compare(case: Case, pool: RankPool) -> dict[str, float]:
    """Planned and measured bytes of the rank that holds most; the ratio is planned to measured."""
    planned = decoder_planner(case.config, "cpu").at(pool.world_size).memory
    found = max(pool.run(measure, case.config), key=lambda result: result["total"])
    metrics: dict[str, float] = {
        "planned_bytes": planned.model_states,
        "measured_bytes": found["total"],
        "ratio": planned.model_states / found["total"],
    }
    for name in STATES:
        metrics |= {f"planned_{name}_bytes": planned.parts()[name], f"measured_{name}_bytes": found[name]}
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu",), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", help="variants, with commas: demo, 20m-stage1, 20m-stage2, 20m-stage3, article")
    parser.add_argument("--quick", action="store_true", help="the demo and the article alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else ["demo", "article"] if options.quick else None
    pool = RankPool(options.ranks)
    if not options.json:
        print(f"model states of a rank, {options.ranks} ranks")
        print(f"{'':12} {'planned MiB':>12} {'measured MiB':>13} {'ratio':>7}")
    try:
        for case in cases(options.ranks):
            if wanted is not None and case.variant not in wanted:
                continue
            metrics = compare(case, pool)
            if options.json:
                row = {"bench": "plan", "system": "raydz", "variant": case.variant, "device": "cpu"}
                print(json.dumps({**row, "ranks": options.ranks, "metrics": metrics, "note": ""}), flush=True)
            else:
                planned, measured = metrics["planned_bytes"] / 2**20, metrics["measured_bytes"] / 2**20
                print(f"{case.variant:12} {planned:12.2f} {measured:13.2f} {metrics['ratio']:7.4f}", flush=True)
    finally:
        pool.stop()


if __name__ == "__main__":
    main()
