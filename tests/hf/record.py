"""Write `recorded/`: checkpoints of two ranks as DeepSpeed itself saves them, and what they must convert to.

    DS_ACCELERATOR=cpu DS_SKIP_CUDA_CHECK=1 OMP_NUM_THREADS=1 python tests/hf/record.py

Needs DeepSpeed 0.19 (a plain `DS_BUILD_OPS=0` wheel is enough), which raydz's own environment has not. Beside each
checkpoint lies `expected.safetensors`: kind/name, from the live engine, with all steps' losses in its metadata.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.hf import foreign_model as foreign  # noqa: E402

BF16 = {"bf16": {"enabled": True}}
CASES: dict[str, dict[str, Any]] = {
    "stage1": {"zero_optimization": {"stage": 1}},
    "stage2": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "stage3": {"zero_optimization": {"stage": 3, "sub_group_size": 60}},
    "bf16-stage1": {"zero_optimization": {"stage": 1}, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16-stage2": {"zero_optimization": {"stage": 2}, **BF16},
    "bf16-stage3": {"zero_optimization": {"stage": 3}, **BF16},
}
UNIVERSAL = {"universal": "stage1", "universal-of-stage3": "stage3"}


def ds_config(case: str) -> dict[str, Any]:
    """The configuration of a case: both DeepSpeed's and raydz's."""
    adam = {"type": "AdamW", "params": {**foreign.ADAM, "torch_adam": True}}
    base = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "optimizer": adam, "steps_per_print": 1000}
    return {**base, **CASES[case]}


def train(case: str, folder: Path) -> None:
    """One rank of the recorded training."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import save_file

    deepspeed.init_distributed(dist_backend="gloo")
    rank = dist.get_rank()
    model = foreign.build()
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.dim() > 1]
    groups = [{"params": decayed}, {"params": [p for p in trained if p.dim() == 1]}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=ds_config(case))

    def step(number: int) -> float:
        ids, labels = foreign.batch(number, rank * foreign.ROWS_A_RANK, foreign.ROWS_A_RANK)
        loss = foreign.loss_of(engine(ids), labels)
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        return float(total) / foreign.RANKS

    losses = [step(number) for number in range(foreign.STEPS)]
    engine.save_checkpoint(str(folder), client_state=foreign.CLIENT_STATE)
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False  # it was done before there were moments
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    tensors = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            tensors[f"weight/{name}"] = safe_get_full_fp32_param(param)
            for kind in ("exp_avg", "exp_avg_sq"):
                tensors[f"{kind}/{name}"] = safe_get_full_optimizer_state(param, kind)
        else:
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                tensors[f"weight/{name}"] = param.detach().clone()
    tensors["buffer/offset"] = model.offset
    losses += [step(foreign.STEPS + number) for number in range(foreign.NEXT_STEPS)]
    if rank == 0 and "round_robin_gradients" in CASES[case]["zero_optimization"]:
        (folder / "losses.json").write_text(json.dumps(losses))  # what safe_get_* gives is wrong there
    elif rank == 0:
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        metadata = {"losses": json.dumps(losses), "deepspeed": deepspeed.__version__, "torch": torch.__version__}
        save_file(tensors, folder / "expected.safetensors", metadata=metadata)


def record(case: str) -> None:
    """Run a case on two ranks."""
    folder = HERE / "recorded" / case
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    subprocess.run([sys.executable, *launcher, case], check=True)
    for script in folder.glob("zero_to_*.py"):
        script.unlink()


def record_universal(name: str, source: str) -> None:
    """DeepSpeed's own conversion of a recorded checkpoint."""
    folder, tag = HERE / "recorded" / name, f"global_step{3}"
    shutil.rmtree(folder, ignore_errors=True)
    script = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--num_extract_workers", "1"]
    places = [
        "--input_folder",
        str(HERE / "recorded" / source / tag),
        "--output_folder",
        str(folder / f"{tag}_universal"),
    ]
    subprocess.run([sys.executable, *script, "--num_merge_workers", "1", *places], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1 and "RANK" in os.environ:
        train(sys.argv[1], HERE / "recorded" / sys.argv[1])
    else:
        for case in sys.argv[1:] or CASES:
            record(case)
        for name, source in UNIVERSAL.items():
            if not sys.argv[1:] or source in sys.argv[1:]:
                record_universal(name, source)
