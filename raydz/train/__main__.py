"""Train without Ray: `torchrun --nproc-per-node 2 -m raydz.train --config run.yaml`, or one plain process.

Neighbours: `loop.py` does the work; `report.py` prints how it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from raydz import log
from raydz.config import load, resolve_paths
from raydz.dist import init_world, shutdown_world
from raydz.errors import RaydzError
from raydz.train.loop import run_training
from raydz.train.summary import describe_result


def main(arguments: list[str] | None = None) -> int:
    """Run on this rank; 0, or 1 after a typed error that was printed."""
    parser = argparse.ArgumentParser(prog="python -m raydz.train", description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True, help="YAML or JSON file of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a dotted key")
    parser.add_argument("--key-map", metavar="FILE", help="the same as --set resume_key_map=FILE")
    options = parser.parse_args(arguments)
    if options.key_map:
        options.set.append(f"resume_key_map={json.dumps(options.key_map)}")
    rank = int(os.environ.get("RANK", "0"))
    log.setup(rank)
    try:
        config = resolve_paths(load(options.config, options.set), os.getcwd())
        log.setup(rank, as_json=config.tracking.log_json)
        threads = config.train.threads
        world = init_world(
            config.train.device,
            timeout_s=config.parallel.collective_timeout_s,
            threads=None if threads == "auto" else threads,
        )
        if rank == 0:
            print(config.to_yaml(), flush=True)
        result = run_training(config, world)
    except RaydzError as error:
        if rank == 0 or os.environ.get("RAYDZ_ALL_ERRORS"):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        shutdown_world()
    if rank == 0:
        print(describe_result(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
