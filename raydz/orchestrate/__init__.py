"""Ray hosts the ranks: `fit`, its workers, what they report. Layer 8, the only folder that imports ray. README.md."""

from raydz.orchestrate.fit import fit

__all__ = ["fit"]
