"""What DeepSpeed keeps beside the optimizer's partitions: shapes, buffers, frozen and tied parameters, counters.

Neighbours: `deepspeed.py` and `universal.py`. One `mp_rank_00_model_states.pt` at stages up to 2, a file a rank at 3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raydz.errors import CheckpointError
from raydz.hf.safe_load import Inert, load_file
from raydz.hf.source import BUFFER, WEIGHT, SourceTensor

_OWN_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts", "micro_steps",
    "csr_tensor_module_names",
}  # fmt: skip


@dataclass(frozen=True)
class ModelStates:
    """The model-states files of one tag; `files[0]` speaks for all but frozen parameters."""

    files: list[dict[str, Any]]
    folder: Path

    @classmethod
    def open(cls, folder: Path, num_files: int) -> ModelStates:
        """Raises:
        CheckpointError: a file is missing, or is not one of DeepSpeed's.
        """
        names = ["mp_rank_00_model_states.pt"]
        if not (folder / names[0]).exists():
            names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(num_files)]
        files = [load_file(folder / name, str(folder / name)) for name in names]
        for key in ("module", "param_shapes", "buffer_names", "global_steps"):
            if key not in files[0]:
                raise CheckpointError(
                    "not a file of DeepSpeed's model states", where=str(folder / names[0]), got=f"no {key}", wanted=key
                )
        return cls(files, folder)

    @property
    def groups(self) -> list[list[str]]:
        """Names of trained parameters by group (stage 3: sub-group), in the order in which they are laid out."""
        return [list(group) for group in self.files[0]["param_shapes"]]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of trained parameters."""
        groups = self.files[0]["param_shapes"]
        return {name: torch.Size(shape) for group in groups for name, shape in group.items()}

    @property
    def aliases(self) -> dict[str, str]:
        """Names of tied parameters that are not stored -> the one that is."""
        return dict(self.files[0].get("shared_params") or {})

    def buffers(self) -> list[SourceTensor]:
        """As they were saved."""
        module = self.files[0]["module"]
        return [_whole(name, BUFFER, module[name]) for name in self.files[0]["buffer_names"]]

    def frozen(self, stage: int) -> list[SourceTensor]:
        """Parameters that are not trained: whole with the module up to stage 2, in equal parts at stage 3."""
        if stage == 3:
            shapes = self.files[0].get("frozen_param_shapes") or {}
            return [self._frozen_parts(name, torch.Size(shape)) for name, shape in shapes.items()]
        known = {*self.shapes, *self.files[0]["buffer_names"], *self.aliases}
        return [
            _whole(name, WEIGHT, value)
            for name, value in self.files[0]["module"].items()
            if name not in known and isinstance(value, Tensor)
        ]

    def _frozen_parts(self, name: str, shape: torch.Size) -> SourceTensor:
        parts = [file["frozen_param_fragments"][name].detach() for file in self.files]
        if sum(part.numel() for part in parts) < shape.numel():
            raise CheckpointError("parts of a frozen parameter are missing", where=f"{self.folder}: {name}")
        return SourceTensor(
            name, WEIGHT, parts[0].dtype, tuple(shape), lambda: torch.cat(parts)[: shape.numel()].view(shape)
        )

    def check_master(self, name: str, master: Tensor) -> Tensor:
        """The master itself, if the module's own weight (whole up to stage 2) is what it rounds to.

        Raises:
            CheckpointError: it is not: the optimizer's files are of another save, or in the wrong order.
        """
        own = self.files[0]["module"].get(name)
        if own is None or own.shape != master.shape or not own.is_floating_point():
            return master
        tolerance = torch.finfo(own.dtype).eps
        if torch.allclose(own.float(), master.float(), rtol=tolerance, atol=tolerance, equal_nan=True):
            return master
        raise CheckpointError(
            "a master weight is not that of the module beside it", where=f"{self.folder}: {name}",
            got=f"they differ by up to {float((own.float() - master.float()).abs().max()):g}", wanted="rounding alone",
            remedy="files of several saves are mixed; or ds_to_universal made this of a run with round_robin_gradients "
            "and got it wrong: convert the ZeRO folder instead",
        )  # fmt: skip

    def client(self, notes: list[str]) -> dict[str, Any]:
        """What the caller of `save_checkpoint` gave; what is no JSON is left out and noted."""
        kept = {}
        for name, value in self.files[0].items():
            if name in _OWN_KEYS:
                continue
            try:
                kept[name] = json.loads(json.dumps(value))
            except (TypeError, ValueError):
                notes.append(f"client state {name!r} is left out: {type(value).__name__} is no JSON")
        return kept


def _whole(name: str, kind: str, value: Tensor) -> SourceTensor:
    return SourceTensor(name, kind, value.dtype, tuple(value.shape), value.detach)


def optimizer_step(state: Mapping[str, Any]) -> int | None:
    """The steps that the optimizer itself has counted, wherever a stage's file has them."""
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict", {}))
    own = base if isinstance(base, Mapping) else {"state": dict(enumerate(base))}
    holders = [*own.get("state", {}).values(), *own.get("param_groups", []), *state.get("param_groups", [])]
    found = [int(holder["step"]) for holder in holders if "step" in holder]
    return max(found) if found else None


def read_counters(model: ModelStates, step: int | None, scaler: Inert | None) -> tuple[dict[str, Any], list[str]]:
    """The engine's counters and what to say about them.

    DeepSpeed's `global_steps` counts skipped steps, raydz's does not: the optimizer's own count decides.
    """
    state, notes = model.files[0], []
    done, skipped = int(state["global_steps"]), int(state.get("skipped_steps") or 0)
    committed = done - skipped if step is None else step
    if committed != done - skipped:
        notes.append(f"the optimizer has made {committed} steps, DeepSpeed counts {done} with {skipped} skipped")
    config = state.get("ds_config") or {}
    accumulation = config.get("gradient_accumulation_steps") if isinstance(config, Mapping) else None
    counters: dict[str, Any] = {
        "global_steps": committed,
        "micro_steps": done * (accumulation if isinstance(accumulation, int) else 1),
        "skipped_steps": skipped,
        "skipped_in_row": 0,
    }
    found = vars(scaler) if isinstance(scaler, Inert) else {}
    if found.get("dynamic"):
        counters["loss_scale"] = {
            "scale": float(found["cur_scale"]),
            "overflows_left": int(found["cur_hysteresis"]),
            "good_steps": int(found["cur_iter"]) - int(found["last_overflow_iter"]) - 1,
            "stuck_steps": 0,
        }
    if state.get("lr_scheduler"):
        notes.append("the learning rate follows from the step and raydz's configuration, not from the stored scheduler")
    return counters, notes
