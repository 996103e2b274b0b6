"""Kernels on flat buffers, each beside the readable torch reference that defines its result. Layer 2.

Called by `raydz.optim` (AdamW), `raydz.dist` (ordered sums), `raydz.zero` and `raydz.offload` (rounding, norms).
Every function here works on tensors of any device: on host memory the compiled kernels of `native/` run when they
are installed, elsewhere the reference itself; the bits are the same.
"""

from raydz.ops.adamw import adamw_step
from raydz.ops.reduction import sum_rows, sum_squares, sum_squares_of_all
from raydz.ops.rounding import merge_master, round_bf16, split_master

__all__ = ["adamw_step", "merge_master", "round_bf16", "split_master", "sum_rows", "sum_squares", "sum_squares_of_all"]
