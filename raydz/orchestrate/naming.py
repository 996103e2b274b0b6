"""The name that `raydz submit --run-name` gives to a run: how it travels, and how it meets the configuration's.

Neighbours: `submit.py` sends it, `fit.py` asks for it.
"""

from __future__ import annotations

import json
import os

from raydz.config import Config, load
from raydz.errors import ConfigError

RUN_NAME = "RAYDZ_RUN_NAME"
"""Variable of a job."""


def named_by_submission(config: Config) -> Config:
    """The same run under the submission's name, where there is one and the configuration has none.

    Raises:
        ConfigError: both have one, and they differ.
    """
    wanted = os.environ.get(RUN_NAME)
    given = ((config._given or {}).get("run") or {}).get("name")
    if not wanted or given == wanted:
        return config
    if given is not None:
        raise ConfigError(
            "the run has two names", where="run.name", got=given, wanted=f"{wanted}, as `raydz submit --run-name` says",
            remedy="leave one of them out",
        )  # fmt: skip
    return load(config, [f"run.name={json.dumps(wanted)}"])
