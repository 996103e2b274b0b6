"""Generations of a run: of two starts of one run the newer counts, and an older one can commit nothing any more.

Neighbours: `train/setup.py` claims a generation at each start; `writer.py` asks the fence right before a commit;
`find.py` and `stock.py` pass over what was committed too late. See "Generations" in README.md.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from raydz.errors import StorageError, Superseded
from raydz.storage import AlreadyExists, Store

FOLDER = "generations"
TAG_BYTES = 64
"""So many of a manifest's first bytes hold its generation."""

_CLAIM = re.compile(r"(\d{10})\.json")
_START = re.compile(r"(\d{10})\.from-(\d{10})\.([0-9a-f]{8})")
_TAG = re.compile(rb'\{\s*"generation":\s*"(\d{1,10}-[0-9a-f]{8})"')
_MAX_RACES = 100


@dataclass(frozen=True)
class History:
    """The generations of a folder, as one listing shows them.

    Attributes:
        newest: number of the newest claim; 0: there is none.
        starts: by generation that began to train, the step it went on from and its token.
    """

    newest: int = 0
    starts: dict[int, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[str]) -> History:
        """From the names below `generations/`; others are passed over."""
        claims, starts = [0], {}
        for name in names:
            if claim := _CLAIM.fullmatch(name):
                claims.append(int(claim[1]))
            elif start := _START.fullmatch(name):
                starts[int(start[1])] = (int(start[2]), start[3])
        return cls(max(claims), starts)

    @property
    def floor(self) -> int | None:
        """Checkpoints up to this step count whoever wrote them; None: all do."""
        later = sorted(self.starts)[1:]
        return min((self.starts[number][0] for number in later), default=None)

    def superseding(self, tag: str | None, step: int) -> int | None:
        """The generation that went on from before `step` while `tag`'s was older: its checkpoint came too late.

        None where the checkpoint counts: no tag, a tag of another folder (a copy), or nobody began before its step.
        """
        number, _, token = (tag or "0-").partition("-")
        if self.starts.get(int(number), (0, ""))[1] != token or not token:
            return None
        later = [other for other, (start, _) in self.starts.items() if other > int(number) and start < step]
        return min(later, default=None)


def read_history(store: Store, folder: str = "") -> History:
    """The generations under `folder`: one listing."""
    root = f"{folder}/{FOLDER}/" if folder else f"{FOLDER}/"
    return History.of(key.removeprefix(root) for key in store.list(root))


def tag_of(head: bytes) -> str | None:
    """The generation that the first `TAG_BYTES` of a manifest name."""
    found = _TAG.match(head)
    return found[1].decode() if found else None


@dataclass(frozen=True)
class Fence:
    """The right of one start of a run to commit, until a newer one claims the next generation.

    Rank 0 has it. The store must refuse a second conditional put, as `probe_writable` proves.
    """

    store: Store
    number: int
    token: str

    @property
    def tag(self) -> str:
        """What this generation's manifests carry."""
        return f"{self.number}-{self.token}"

    @classmethod
    def claim(cls, store: Store) -> Fence:
        """Take the next number: from now on no older generation commits. Raises: StorageError."""
        token = secrets.token_hex(4)
        about = {"token": token, "host": socket.gethostname(), "pid": os.getpid(), "claimed": round(time.time(), 3)}
        body = json.dumps(about).encode()
        number = read_history(store).newest
        for _ in range(_MAX_RACES):
            number += 1
            key = f"{FOLDER}/{number:010d}.json"
            try:
                store.put(key, body, if_absent=True)
            except AlreadyExists:
                if store.get(key) != body:  # else ours: the answer to the first try was lost
                    continue
            return cls(store, number, token)
        raise StorageError(
            "no generation could be claimed", where=f"{store.uri}/{FOLDER}", got=f"{_MAX_RACES} claims by others",
            remedy="something starts this run again and again",
        )  # fmt: skip

    def began(self, step: int) -> None:
        """Say where this generation goes on, before it trains: what older ones commit beyond that step does not count.

        Raises:
            Superseded: a newer generation has been claimed.
        """
        self.store.put(f"{FOLDER}/{self.number:010d}.from-{step:010d}.{self.token}", b"{}")
        self.check()

    def check(self) -> None:
        """Raises: Superseded: a newer generation has been claimed. StorageError."""
        newest = read_history(self.store).newest
        if newest > self.number:
            raise Superseded(
                "a newer start of this run has taken over", where=f"{self.store.uri}/{FOLDER}",
                got=f"generation {self.number}", wanted=f"{newest}, the newest",
                remedy="nothing is lost: the newer one goes on; two jobs at once need two run names",
            )  # fmt: skip
