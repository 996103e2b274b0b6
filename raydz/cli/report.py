"""Everything `raydz report` says, as findings: first what is installed, then this machine, then what is around it.

Neighbours: `main.py` prints them; each line is made by `packages`, `compute`, `machine`, `cluster` or `credentials`.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raydz.cli import cluster, compute, machine, packages
from raydz.cli.credentials import credentials
from raydz.cli.finding import Finding, guarded


def collect(s3: str | None = None, endpoint_url: str | None = None) -> list[Finding]:
    """Look at everything; with `s3` also write, read and delete an object below that URI.

    Raises:
        ConfigError: `s3` or `endpoint_url` is no URI, or holds a credential.
    """
    from raydz.storage import S3Options, open_store

    options = S3Options(endpoint_url=endpoint_url)
    if s3 is not None:
        open_store(s3, options)  # contacts nothing: a mistake in the option is no finding
    steps = [
        ("raydz", packages.interpreter),
        ("packages", packages.packages),
        ("native kernels", compute.kernels),
        ("torch threads", compute.threads),
        ("torch.distributed", compute.backends),
        ("gpus", compute.gpus),
        ("attention", compute.attention),
        ("cpus", machine.cpus),
        ("memory", machine.memory),
        ("disks", machine.disks),
        ("ray cluster", lambda: cluster.ray_cluster(os.environ)),
        ("s3", lambda: storage(s3, options)),
    ]
    return [finding for name, step in steps for finding in guarded(name, step)]


def storage(uri: str | None, options: Any) -> Iterator[Finding]:
    """Where credentials would come from, or what happened to an object in a throw-away folder under `uri`."""
    if uri is None:
        yield credentials(os.environ, Path.home())
        return
    from raydz.storage import open_store

    store = open_store(f"{uri.rstrip('/')}/raydz-report-{uuid.uuid4().hex[:12]}", options)
    start = time.perf_counter()
    weaknesses = store.probe_writable()
    elapsed = time.perf_counter() - start
    detail = f"{uri}: written, read and deleted in {elapsed:.2f} s; a second put was refused"
    if weaknesses:
        remedy = "raydz makes up for it with more requests; a store without these weaknesses is faster and safer"
        yield Finding("s3", "odd", f"{detail}; does not keep its promise about: {', '.join(weaknesses)}", remedy)
    else:
        yield Finding("s3", "ok", f"{detail}, damaged bytes too")


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """What `--json` prints."""
    return {"findings": [asdict(finding) for finding in findings]}


def closing_line(findings: Sequence[Finding]) -> str:
    """How many things are to be mended."""
    broken = sum(finding.state == "broken" for finding in findings)
    odd = sum(finding.state == "odd" for finding in findings)
    return "nothing to mend" if not broken + odd else f"{broken} broken, {odd} odd"
