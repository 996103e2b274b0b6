"""The one place that holds raydz's version. Layer 0; `pyproject.toml` and the compiled kernels read it from here."""

from __future__ import annotations

__version__ = "0.1.0"
