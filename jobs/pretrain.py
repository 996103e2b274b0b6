"""Pretrain a language model on a Ray cluster.

    ray job submit --working-dir . -- python jobs/pretrain.py --config run.yaml --set train.steps=1000

Without --config it trains the demonstration: a small decoder under ZeRO-3 on two workers, on a text that raydz ships.
Exit code: 0 when the run reached its last step (now or before), 1 after an error, which is printed, 130 or 143 when it
was stopped (Ctrl-C, SIGTERM, `ray job stop`): then it has saved, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import raydz
from raydz.train.summary import describe_result

DEMO = Path(__file__).parent / "configs" / "demo.yaml"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(DEMO), help="YAML or JSON file of the run (default: the demonstration)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a dotted key")
    parser.add_argument("--key-map", metavar="FILE", help="the same as --set resume_key_map=FILE")
    parser.add_argument("--result", metavar="FILE", help="write the result as JSON, too")
    options = parser.parse_args(arguments)
    if options.key_map:
        options.set.append(f"resume_key_map={json.dumps(options.key_map)}")
    return options


def main() -> int:
    """Train; returns the exit code."""
    options = parse()
    try:
        config = raydz.load_config(options.config, options.set)
        result = raydz.fit(config)
    except raydz.RaydzError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    print(describe_result(result), flush=True)
    if options.result:
        Path(options.result).write_text(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
