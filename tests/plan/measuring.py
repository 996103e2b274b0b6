"""Bytes and elements of a real engine over raydz's decoder, counted from its tensors on one rank; saved activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydz.config import Config
from raydz.plan.activations import Workload

_STATES = ("weights", "masters", "moments", "gradients", "sums")


def measure(rank: int, world_size: int, config: Config) -> dict[str, int]:
    """Bytes by part between backward and step of the third step, its peaks, and the elements it sent."""
    import raydz.engine
    from raydz.train.build import build_model

    torch.manual_seed(0)
    module = build_model(config, 0, None)
    engine = raydz.engine.initialize(module, config.engine(), device="cpu", ema_decay=config.train.ema_decay)
    peaks = {"gathered_peak": 0, "filled_peak": 0}
    watch(engine, peaks)
    for _ in range(2):
        backwards(engine, config, rank)
        engine.step()
    before, before_bytes = engine.clock.elements_sent, bytes_sent(engine)
    peaks.update(dict.fromkeys(peaks, 0))
    backwards(engine, config, rank)
    found = held(engine) | peaks
    engine.step()
    found["sent"] = engine.clock.elements_sent - before
    found["sent_bytes"] = bytes_sent(engine) - before_bytes
    engine.destroy()
    return found


def bytes_sent(engine: Any) -> int:
    comms = engine.comms
    return sum(comm.bytes_sent for comm in {comms.gather, comms.reduce, comms.world, comms.near} if comm is not None)


def backwards(engine: Any, config: Config, rank: int) -> None:
    """All micro-batches of a step, without the last `step`."""
    batch = engine.batch
    generator = torch.Generator().manual_seed(rank)
    shape = (batch.micro_batch, config.data.sequence_length)
    for i in range(batch.accumulation):
        ids = torch.randint(0, config.model.vocab_size, shape, generator=generator)
        engine.backward(engine(ids, labels=ids), denominator=float(ids.numel()))
        if i + 1 < batch.accumulation:
            engine.step()


def watch(engine: Any, peaks: dict[str, int]) -> None:
    """Look at gathered and gradient buffers whenever a module begins or ends its part."""

    def look(*_: Any) -> None:
        groups = [g for g in engine.sharded.groups if not g.keeps_parameters]
        peaks["gathered_peak"] = max(peaks["gathered_peak"], size([g.full for g in groups]))
        peaks["filled_peak"] = max(peaks["filled_peak"], size([g._full for g in engine.sharded.gradients]))

    for module in engine.module.modules():
        module.register_forward_pre_hook(look)
        if module is not engine.module and not isinstance(module, nn.Embedding):  # their inputs have no gradients
            module.register_full_backward_hook(look)


def held(engine: Any) -> dict[str, int]:
    """Bytes by the plan's names, each storage where it is met first; `total` counts every storage once."""
    groups, gradients = engine.sharded.groups, engine.sharded.gradients
    moments = [t for state in engine.optimizer.states for t in state.values()]
    if engine.average is not None:
        moments += engine.average.values
    parts: dict[str, list[Tensor | None]] = {
        "weights": [t for g in groups for t in (g.full if g.keeps_parameters else None, g.weights.compute, second(g))],
        "masters": [t for g in groups for t in (g.weights.low, g.weights.separate)],
        "moments": moments,
        "gradients": [grads._full for grads in gradients if grads._full is not grads.reduced or not is_sum(grads)],
        "sums": [grads.reduced for grads in gradients],
    }
    seen: set[int] = set()
    found = {name: size(parts[name], seen) for name in _STATES}
    return found | {"total": sum(found.values())}


def second(group: Any) -> Tensor | None:
    """This rank's part of the copy that near ranks keep."""
    copy = group.gathering.second if group.gathering is not None else None
    return None if copy is None else copy.values


def is_sum(grads: Any) -> bool:
    """Whether a buffer that holds gradients and their sum counts as the sum: on one rank, if it is fp32."""
    return grads.comm.world_size == 1 and grads._full is not None and grads._full.dtype == torch.float32


def size(tensors: Sequence[Tensor | None], seen: set[int] | None = None) -> int:
    seen = set() if seen is None else seen
    total = 0
    for tensor in tensors:
        if tensor is None or tensor.untyped_storage()._cdata in seen:
            continue
        seen.add(tensor.untyped_storage()._cdata)
        total += tensor.untyped_storage().nbytes()
    return total


def saved_for_backward(work: Workload, dtype: torch.dtype, device: str) -> int:
    """Bytes of storages that backward of one micro-batch of packed documents will read, without the parameters."""
    from raydz.models import Decoder, DecoderShape, causal_lm_loss

    sizes = work.sizes
    torch.manual_seed(0)
    shape = DecoderShape(
        sizes.vocab_size, sizes.hidden_size, sizes.num_layers, sizes.num_heads, sizes.num_kv_heads,
        sizes.intermediate_size, activation_checkpointing=work.recomputes, loss_chunk_tokens=work.loss_chunk,
    )  # fmt: skip
    model = Decoder(shape).to(device=device, dtype=dtype).train()
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    ids = torch.randint(0, sizes.vocab_size, (work.rows, work.length), device=device)
    positions = torch.arange(work.length, device=device).expand(work.rows, work.length)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "document_ids": torch.zeros_like(ids)}
    causal_lm_loss(model, batch)  # the first call tries attention kernels, and would leave traces
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = causal_lm_loss(model, batch)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
    del loss
    return sum(size for key, size in storages.items() if key not in parameters)
