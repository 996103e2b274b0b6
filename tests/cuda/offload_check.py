"""On a GPU: the optimizer in host memory gives the bits of the optimizer on the device, in every mode and precision.

    python tests/cuda/offload_check.py

One rank. The oracle is the engine without offload, whose kernels on a GPU are Triton's: other code on another machine
than the C++ kernels that update in host memory. Clipping fires in some steps and not in others.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.nn.functional as F

import raydz
from raydz.models import Decoder, DecoderShape

SHAPE = DecoderShape(512, 256, 6, 4, 4, 704)
STEPS = 6


def config_of(precision: str, stage: int, clip: float, accumulation: int = 1, optimizer: str = "AdamW") -> dict:
    sections: dict[str, Any] = {
        "fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12}},
        "bf16 moments": {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
        "bf16 masters": {
            "bf16": {"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}
        },
    }[precision]  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation, "gradient_clipping": clip,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage}, "parallel": {"activation_checkpointing": "full"}, **sections,
    }  # fmt: skip


def hosted(config: dict, mode: str, **section: Any) -> dict:
    zero = {**config["zero_optimization"], "offload_optimizer": {"device": "cpu", **section}}
    return {**config, "zero_optimization": zero, "parallel": {**config["parallel"], "offload_update": mode}}


def build(config: dict):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder(SHAPE)
    return raydz.initialize(model, config, device="cuda")


def train(engine, steps: range) -> list[float]:
    norms = []
    for step in steps:
        for micro in range(engine.batch.accumulation):
            generator = torch.Generator().manual_seed(100 * step + micro)
            ids = torch.randint(0, 512, (4, 65), generator=generator).cuda()
            engine.backward(F.cross_entropy(engine(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten()))
            report = engine.step()
        norms.append(report.grad_norm)
    return norms


def bits_of(engine) -> list[bytes]:
    found = []
    for group, states in zip(engine.optimizer.groups, engine.optimizer.states, strict=True):
        for tensor in (group.weights.compute, group.weights.master(), *states.values()):
            found.append(tensor.detach().cpu().clone().view(torch.uint8).numpy().tobytes())
    return found


def run(config: dict) -> tuple[list[float], list[bytes], float]:
    engine = build(config)
    norms = train(engine, range(1, STEPS + 1))
    bits = bits_of(engine)
    offload = engine.last_report.offload
    engine.destroy()
    return norms, bits, 0.0 if offload is None else offload.rollback_rate


def check_bits() -> list[str]:
    faults = []
    cases = [(p, 2, 1, "AdamW") for p in ("fp32", "bf16", "fp16", "bf16 moments", "bf16 masters")]
    cases += [("bf16", 3, 2, "AdamW"), ("bf16", 0, 1, "Lion"), ("bf16", 1, 2, "SGD")]
    for precision, stage, accumulation, optimizer in cases:
        probe, _, _ = run(config_of(precision, stage, 1e9, accumulation, optimizer))
        for clip in (sorted(probe)[STEPS // 2], 1e9):
            config = config_of(precision, stage, clip, accumulation, optimizer)
            norms, bits, _ = run(config)
            for mode in ("waiting", "speculative"):
                found_norms, found_bits, rate = run(hosted(config, mode))
                same = sum(a == b for a, b in zip(found_bits, bits, strict=True))
                is_good = found_norms == norms and same == len(bits)
                what = f"{precision}, stage {stage}, {accumulation} micro-batches, {optimizer}, {mode}, q {rate:.2f}"
                print(f"{'ok ' if is_good else 'BAD'} {what}: {same} of {len(bits)} tensors equal", flush=True)
                faults += [] if is_good else [what]
    return faults


def check_resume() -> list[str]:
    """Saved from the host behind training, loaded on the device, and the other way round: the next steps agree."""
    config, faults = config_of("bf16", 2, 0.5), []
    for first, then in ((hosted(config, "auto"), config), (config, hosted(config, "auto", ratio=0.5))):
        with tempfile.TemporaryDirectory() as folder:
            saving = build(first)
            train(saving, range(1, 4))
            handle = saving.save_checkpoint(folder, async_save=True)
            train(saving, range(4, 7))
            handle.result()
            loading = build(then)
            loading.load_checkpoint(folder)
            train(loading, range(4, 7))
            is_good = bits_of(saving) == bits_of(loading)
            print("ok  resumed" if is_good else "BAD resumed", flush=True)
            faults += [] if is_good else ["resume"]
            saving.destroy()
            loading.destroy()
    return faults


def main() -> None:
    faults = check_bits() + check_resume()
    print("offload_check: " + (f"{len(faults)} faults" if faults else "all bits equal"))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
