"""Ranks that do different things end within seconds, each with an error that names what differs; never a hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from raydz.dist.monitor import State, diagnose
from raydz.dist.sequence import SequenceLog, first_difference
from tests.support.runs import REPOSITORY


def run_ranks(kind: str, limit_s: float = 60) -> tuple[int, str, float]:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(REPOSITORY / "tests" / "support" / "divergent.py"), kind],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


def test_a_branch_that_depends_on_the_rank_is_named_on_every_rank() -> None:
    code, output, _ = run_ranks("branch")
    assert code != 0
    assert "ranks do different things and would wait for each other for ever" in output
    assert "blocks.1" in output and "rank 0:" in output and "rank 1:" in output


@pytest.mark.slow
def test_a_rank_that_is_done_early_is_an_error_that_names_the_collective() -> None:
    code, output, _ = run_ranks("uneven")
    assert code != 0 and "PeerLost" in output and "another rank has gone or did not come" in output


def test_an_exception_on_one_rank_ends_all_with_its_traceback() -> None:
    code, output, _ = run_ranks("exception")
    assert code != 0 and "ZeroDivisionError: a bug on rank 1" in output


@pytest.mark.slow
def test_another_collective_on_one_rank_is_named() -> None:
    code, output, _ = run_ranks("other_collective")
    assert code != 0 and ("ranks do different things" in output or "ranks have done different things" in output)


@pytest.mark.slow
def test_a_rank_that_is_only_slow_is_waited_for() -> None:
    code, output, _ = run_ranks("slow")
    assert code == 0 and output.count("came through") == 2, output[-2000:]


def note_something_extra(rank: int, world_size: int) -> str:
    import torch

    import raydz
    from raydz.errors import TrainingError

    config = {"train_batch_size": 2, "zero_optimization": {"stage": 2}}
    engine = raydz.initialize(torch.nn.Linear(4, 4), config, device="cpu")
    if rank == 1:
        engine.comms.gather.log.note("gather something of its own")
    engine.backward(engine(torch.ones(1, 4)).sum())
    weights = [group.weights.master().clone() for group in engine.sharded.groups]
    try:
        engine.step()
    except TrainingError as error:
        same = all(torch.equal(a, g.weights.master()) for a, g in zip(weights, engine.sharded.groups, strict=True))
        assert same, "nothing is committed"
        return str(error)
    finally:
        engine.destroy()
    return "no error"


def test_different_histories_are_found_with_the_norm_before_anything_is_committed(ranks) -> None:
    messages = ranks(2).run(note_something_extra)
    assert messages[0] == messages[1]
    assert "ranks have done different things" in messages[0] and "rank 1: gather something of its own" in messages[0]


def test_the_first_difference_is_found_among_what_all_remember() -> None:
    same = [(n, f"gather {n}") for n in range(1, 9)]
    assert first_difference([same, same[:5]]) is None, "a rank that is behind has done nothing else"
    assert first_difference([same, []]) is None, "one that has launched nothing yet is only slow"
    other = [*same[:6], (7, "gather x"), (8, "gather y")]
    assert first_difference([same, other, same[:7]]) == (7, ["gather 7", "gather x", "gather 7"])
    assert first_difference([same[4:], other[2:]]) == (7, ["gather 7", "gather x"])


def test_equal_sequences_have_equal_digests_and_others_do_not() -> None:
    logs = [SequenceLog("a") for _ in range(3)]
    for log in logs:
        log.note("gather 1")
    logs[2].note("gather 2")
    assert logs[0].digest == logs[1].digest != logs[2].digest


def test_only_ranks_that_can_never_go_on_are_called_divergent() -> None:
    at = State("gather a (#3 of gathers)", {"gathers": [(3, "gather a")]})
    elsewhere = State("the gradient norm (#9 of reductions)", {"gathers": [(2, "gather b")]})
    computing = State(None, {"gathers": [(2, "gather b")]})
    assert diagnose([at, at]) is None, "the same collective: the network is slow"
    assert diagnose([at, computing]) is None and diagnose([at, None]) is None
    error = diagnose([at, elsewhere])
    assert error is not None and "rank 1: the gradient norm" in str(error)
