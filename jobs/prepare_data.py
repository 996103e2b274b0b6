"""Tokenise text ahead of a run: `python jobs/prepare_data.py --input corpus/ --output tokens/ --vocab-size 32000`.

A run whose config names the same sources and tokenizer, with `data.cache_dir` set to the output, starts at once. All of
the work is in raydz/data/prepare.py.
"""

from __future__ import annotations

import argparse
import sys

from raydz import log
from raydz.data import PreparedData, SourceSpec, TokenizerSpec, prepare
from raydz.data.tokens import read_index
from raydz.errors import RaydzError
from raydz.units import format_bytes, format_count


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files, folders, globs, s3://... or sample:wordnet")
    add("--output", required=True, help="folder of caches (the run's data.cache_dir)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tokenizer", help="a tokenizer.json, or a folder that holds one")
    which.add_argument("--vocab-size", type=int, default=2048, help="train a tokenizer of this size (default 2048)")
    add("--eos", default=TokenizerSpec.eos, help=f"end-of-document token (default {TokenizerSpec.eos})")
    add("--eval-fraction", type=float, default=0.02, help="share of documents to hold out (default 0.02)")
    add("--column", default="text", help="column of parquet, arrow and JSON lines (default text)")
    add("--split", default="lines", choices=["lines", "blank_lines", "file"], help="what a document of a .txt is")
    add("--endpoint-url", help="of an S3 store other than AWS; credentials come from the environment")
    add("--region", help="of the S3 store")
    return parser.parse_args(arguments)


def summarise(prepared: PreparedData) -> str:
    """What a person wants to know before training on it."""
    lines = [f"prepared {prepared.folder}", f"  vocabulary      {prepared.vocab_size} ids, {prepared.tokenizer_path}"]
    for name, folder in {"train": prepared.train_dir, **prepared.eval_dirs}.items():
        index = read_index(folder)
        size = format_bytes(sum(shard.num_bytes for shard in index.shards))
        tokens, documents = format_count(index.num_tokens), format_count(index.num_documents)
        lines.append(f"  {name:<15} {tokens} tokens in {documents} documents, {len(index.shards)} shards, {size}")
    entropy = f"{prepared.unigram_entropy:.3f} nats per token"
    lines.append(f"  unigram entropy {entropy}: the loss of a model that has learned only frequencies")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prepare and print; returns the exit code."""
    args = parse_arguments(arguments)
    log.setup()
    try:
        sources = [SourceSpec(path, args.column, args.split, args.endpoint_url, args.region) for path in args.input]
        tokenizer = TokenizerSpec(args.tokenizer, args.vocab_size, eos=args.eos)
        prepared = prepare(sources, {}, args.eval_fraction, tokenizer, None, args.output)
    except RaydzError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summarise(prepared))
    return 0


if __name__ == "__main__":
    sys.exit(main())
