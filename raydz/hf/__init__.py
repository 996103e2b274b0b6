"""Checkpoints of others: from and to Hugging Face folders, from DeepSpeed and torch DCP. Layer 5. See README.md here.

Neighbours: `cli/convert.py` calls `open_source`, `write_checkpoint` and `export`; `train/` runs `BackgroundExports`
beside training; `checkpoint/` has raydz's own format, `storage/` the bytes.
"""

from raydz.hf.background import BackgroundExports, ExportRequest
from raydz.hf.checkpoint_writer import write_checkpoint
from raydz.hf.detect import open_source
from raydz.hf.export import Export, export_folder, export_single
from raydz.hf.initial import load_initial
from raydz.hf.llama import config_of_decoder, derive_config
from raydz.hf.renamed import Renames, rename_source
from raydz.hf.source import Source, SourceTensor

__all__ = [
    "BackgroundExports",
    "Export",
    "ExportRequest",
    "Renames",
    "Source",
    "SourceTensor",
    "config_of_decoder",
    "derive_config",
    "export_folder",
    "export_single",
    "load_initial",
    "open_source",
    "rename_source",
    "write_checkpoint",
]
