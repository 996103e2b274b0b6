"""Checkpoints as intervals of logical tensors, committed by a manifest that is written last: layer 5.

Neighbours: `engine.py` saves and loads through `save` and `load`; `storage/` holds the bytes. See README.md here.
"""

from raydz.checkpoint.background import AfterCommit, SaveHandle
from raydz.checkpoint.find import (
    checkpoint_uri,
    committed_steps,
    find_checkpoint,
    open_checkpoint,
    open_together,
    set_aside,
    step_folder,
)
from raydz.checkpoint.generations import Fence
from raydz.checkpoint.key_map import KeyMap
from raydz.checkpoint.load import LoadReport, LoadRequest, load_pieces
from raydz.checkpoint.manifest import DataFile, Manifest, Piece, TensorEntry
from raydz.checkpoint.pieces import StatePiece, state_pieces
from raydz.checkpoint.writer import SaveRequest, save

__all__ = [
    "AfterCommit",
    "DataFile",
    "Fence",
    "KeyMap",
    "LoadReport",
    "LoadRequest",
    "Manifest",
    "Piece",
    "SaveHandle",
    "SaveRequest",
    "StatePiece",
    "TensorEntry",
    "checkpoint_uri",
    "committed_steps",
    "find_checkpoint",
    "load_pieces",
    "open_checkpoint",
    "open_together",
    "save",
    "set_aside",
    "state_pieces",
    "step_folder",
]
