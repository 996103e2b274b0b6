"""The plan's estimate of activations on a GPU, and of the host memory of a save: for machines that have one, not
collected by pytest.

    python tests/cuda/plan_check.py

Prints planned and saved bytes of one micro-batch of packed documents and exits 1 where they differ by more than 5%;
and planned and page-locked bytes of a save behind training, which must be equal.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import raydz.engine
from raydz.config import load
from raydz.plan import decoder_planner
from raydz.plan.activations import Workload, kept_bytes
from raydz.plan.shapes import DecoderSizes
from raydz.train.build import build_model
from tests.plan.measuring import saved_for_backward

TOLERANCE = 0.05
CASES = [
    DecoderSizes(4096, 1024, 4, 8, 8, 2816),
    DecoderSizes(4096, 1024, 4, 8, 2, 2816),
]


def main() -> int:
    failed = 0
    for sizes in CASES:
        for dtype in (torch.bfloat16, torch.float32):
            for recomputes in ("none", "full"):
                work = Workload(sizes, 512, 4, recomputes, has_fused_norm=True, repeats_heads=dtype == torch.float32)
                planned = kept_bytes(work, dtype.itemsize) + work.tokens * (4 * sizes.vocab_size + 8)
                saved = saved_for_backward(work, dtype, "cuda")
                fits = abs(planned / saved - 1) <= TOLERANCE
                failed += not fits
                name = f"{dtype}, {sizes.num_kv_heads} of {sizes.num_heads} key heads, recomputes {recomputes}"
                state = "ok" if fits else "FAILED"
                print(f"{state:7} {name}: planned {planned:,} saved {saved:,} ({planned / saved:.3f})")
    for stage in range(4):
        failed += not snapshot_is_planned(stage)
    return int(failed > 0)


def snapshot_is_planned(stage: int) -> bool:
    """Save a bf16 decoder that lives on the GPU, and look at the image on the host."""
    model = {"vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = load({"model": model, "train_batch_size": 4, "data": {"sequence_length": 64}, "bf16": {"enabled": True},
                   "zero_optimization": {"stage": stage}})  # fmt: skip
    planned = decoder_planner(config, "cuda").at(1).snapshot_bytes
    engine = raydz.engine.initialize(build_model(config, 0, None), config.engine(), device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, async_save=True).result(60)
        image = engine._saves._image  # type: ignore[union-attr]
        found = image.num_bytes - 8 - int.from_bytes(image.view[:8], "little")
        is_pinned = image._pinned
        engine.destroy()
    fits = found == planned and is_pinned
    print(f"{'ok' if fits else 'FAILED':7} snapshot at stage {stage}: planned {planned:,} page-locked {found:,}")
    return fits


if __name__ == "__main__":
    sys.exit(main())
