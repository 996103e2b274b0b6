"""Reading torch's own files without running what is in them.

Neighbours: `deepspeed.py`, `universal.py` and `dcp.py` read through this. torch's weights-only loader builds tensors
and plain containers; the few classes of DeepSpeed that its files name are replaced by inert stand-ins of ours, so that
DeepSpeed need not be installed and none of its code runs.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from raydz.errors import CheckpointError


class Inert:
    """Takes the place of an object in a file: keeps its fields and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


_STAND_INS = [
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
]
_UNSUPPORTED = re.compile(r"GLOBAL ([\w.]+)")


def load_file(path: Path | IO[bytes], where: str) -> Any:
    """What `torch.save` wrote: tensors, containers and plain values. A path is mapped, so that tensors cost no memory.

    Raises:
        CheckpointError: not such a file; damaged; or it names a class or function that is not known to be harmless,
            which is neither looked up nor called.
    """
    mapped = isinstance(path, Path) and zipfile.is_zipfile(path)
    try:
        with torch.serialization.safe_globals([(Inert, name) for name in _STAND_INS]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise CheckpointError("a file of the checkpoint is missing", where=where) from None
    except pickle.UnpicklingError as error:
        found = _UNSUPPORTED.search(str(error))
        if found is None:
            raise CheckpointError(
                "not a file that torch wrote, or damaged", where=where, got=_first_line(error)
            ) from None
        raise CheckpointError(
            "the file asks for Python code that is not known to be harmless; nothing of it was run", where=where,
            got=found[1], wanted="tensors, lists, dicts, numbers and text",
            remedy="save the checkpoint again without such an object in its client state",
        ) from None  # fmt: skip
    except (RuntimeError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError("not a file that torch wrote, or damaged", where=where, got=_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
