"""The plan's estimate of activations on a GPU, for machines that have one: not collected by pytest.

    python tests/cuda/plan_check.py

Prints planned and saved bytes of one micro-batch of packed documents and exits 1 where they differ by more than 5%.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from raydz.plan.activations import Workload, kept_bytes
from raydz.plan.shapes import DecoderSizes
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
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
