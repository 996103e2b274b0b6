"""Decoder models under Hugging Face's names, their initialisation and loss: layer 4. See README.md in this folder."""

from raydz.models.checkpointing import wrap_blocks
from raydz.models.compiling import compile_blocks
from raydz.models.decoder import Decoder, DecoderShape
from raydz.models.loss import IGNORE_INDEX, causal_lm_loss, chunked_cross_entropy

__all__ = [
    "IGNORE_INDEX",
    "Decoder",
    "DecoderShape",
    "causal_lm_loss",
    "chunked_cross_entropy",
    "compile_blocks",
    "wrap_blocks",
]
