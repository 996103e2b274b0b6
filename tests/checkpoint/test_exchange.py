"""Word between ranks through the job's store: any length, any order, and never for ever."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from raydz.checkpoint import exchange
from raydz.checkpoint.exchange import ReceiptExchange
from raydz.errors import CheckpointError
from tests.support.ranks import free_port


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", free_port(), is_master=True, timeout=timedelta(seconds=10))


def settle_on(store, receipts, decide, number=1, timeout_s=10.0):
    """What each rank (a thread) learns; ranks without a receipt do not come."""
    told = {}

    def run(rank):
        member = ReceiptExchange(store, "t", rank, len(receipts))
        told[rank] = (
            member.agree_on(number, f"from-{rank}", timeout_s),
            member.settle(number, receipts[rank], decide, timeout_s),
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank, receipt in enumerate(receipts) if receipt]
    for thread in reversed(threads):  # rank 0 last
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return told


def test_every_rank_learns_what_rank_0_decides_of_all_receipts_in_order(store):
    receipts = [{"rank": rank, "text": "ä" * 10} for rank in range(3)]
    told = settle_on(store, receipts, lambda found: {"found": found})
    assert told == {rank: ("from-0", {"found": receipts}) for rank in range(3)}


def test_receipts_longer_than_the_store_takes_at_once_arrive(store):
    import random

    text = random.Random(1).randbytes(5 << 20).hex()  # 10 MiB, which the store would refuse; half of it is entropy
    told = settle_on(store, [{"a": 1}, {"text": text}], lambda found: {"equal": found[1]["text"] == text})
    assert told[0][1] == told[1][1] == {"equal": True}


def test_store_is_left_as_it_was(store):
    before = store.num_keys()
    for number in (1, 2, 3):
        settle_on(store, [{"a": 1}, {"a": 2}], lambda found: {}, number)
    assert store.num_keys() == before


def test_error_of_the_decision_is_told_to_all(store):
    def decide(found):
        raise ZeroDivisionError("a bug")

    told = settle_on(store, [{"a": 1}, {"a": 2}], decide)
    assert told[0][1] == told[1][1] == {"error": "ZeroDivisionError: a bug"}


def test_ranks_that_do_not_come_are_named_to_those_that_did(store):
    told = settle_on(store, [{"a": 0}, {"a": 1}, None, None], lambda found: {}, timeout_s=0.2)
    assert told[0][1]["error"] == told[1][1]["error"] == "no word from rank 2, 3 within 0.2 s"


def test_rank_0_that_does_not_come_is_named(store, monkeypatch):
    monkeypatch.setattr(exchange, "_GRACE_S", 0.1)
    with pytest.raises(CheckpointError, match="rank 0 did not say"):
        ReceiptExchange(store, "t", 1, 2).agree_on(1, "x", 0.1)
    with pytest.raises(CheckpointError, match="rank 0 did not say"):
        ReceiptExchange(store, "t", 1, 2).settle(1, {}, lambda found: {}, 0.1)


def test_store_that_is_gone_is_named():
    port = free_port()
    master = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
    member = ReceiptExchange(client, "t", 1, 2)
    del master
    with pytest.raises(CheckpointError, match="store of the job is gone"):
        member.settle(1, {"a": 1}, lambda found: {}, 5.0)


def test_world_of_one_needs_no_store_and_a_larger_one_does():
    assert ReceiptExchange(None, "t", 0, 1).settle(1, {"a": 1}, lambda found: {"n": len(found)}, 1.0) == {"n": 1}
    with pytest.raises(CheckpointError, match="cannot tell each other"):
        ReceiptExchange(None, "t", 0, 2)
