"""Who posts beats for whom, how many calls a board gets, and what the watchdog makes of it; without a cluster."""

from __future__ import annotations

import uuid
from types import SimpleNamespace

import pytest

from raydz.config.cluster import FailureConfig
from raydz.orchestrate import board as board_module
from raydz.orchestrate.beats import Beats, is_poster, post_every_s
from raydz.orchestrate.board import Beat, Board, Standing
from raydz.orchestrate.node_mail import NodeMail
from raydz.orchestrate.place import Place
from raydz.orchestrate.watchdog import find_stuck, hang_limit_s, is_overdue

CONFIG = FailureConfig(hang_factor=3.0, hang_floor_s=15.0)


def beat(rank: int, step: int = 5, calls: int = 9, waits_for: str | None = "gather") -> Beat:
    return Beat(rank, 1000 + rank, "node", step, calls, waits_for)


class CountingBoard:
    """A board whose calls arrive at once and are counted."""

    def __init__(self) -> None:
        self.board, self.posts = Board(), 0
        self.post_beats = SimpleNamespace(remote=self._take)

    def _take(self, *arguments) -> None:
        self.posts += 1
        self.board.post_beats(*arguments)

    def beats(self) -> dict[int, tuple[Beat, float]]:
        return self.board.standing()[0].beats


@pytest.fixture
def node():
    """Beats of one node's ranks, without their threads."""
    made: list[Beats] = []

    def make(board: CountingBoard, count: int, world_size: int) -> list[Beats]:
        token = uuid.uuid4().hex
        post = board.post_beats.remote
        made.extend(Beats(post, Place(rank, world_size, rank, count), token, "n" * 56) for rank in range(count))
        return made[-count:]

    yield make
    for one in made:
        one._mail.close()


def test_the_lowest_rank_of_a_node_posts_for_all_of_it(node) -> None:
    board = CountingBoard()
    ranks = node(board, 4, 4)
    for second in range(5):
        for rank in reversed(range(4)):
            ranks[rank].beat(beat(rank), float(second))
    assert board.posts == 4 + 4, "one a second; in the first, nobody has heard the others yet"
    assert set(board.beats()) == {0, 1, 2, 3}


def test_when_it_stops_the_next_one_posts_and_it_is_the_one_that_grows_silent(node, monkeypatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(board_module, "time", SimpleNamespace(time=lambda: clock.now))
    board = CountingBoard()
    ranks = node(board, 3, 3)
    for second in range(12):
        clock.now = 1000.0 + second
        for rank in range(3):
            if rank != 0 or second < 2:
                ranks[rank].beat(beat(rank), float(second))
    standing, now = board.board.standing()
    ages = {rank: now - at for rank, (_, at) in standing.beats.items()}
    assert ages[0] == pytest.approx(10.0, abs=0.5) and max(ages[1], ages[2]) < 0.5


def test_a_board_gets_a_bounded_number_of_calls_however_many_ranks_there_are(node) -> None:
    for world_size in (8, 64, 1024, 8192):
        place = Place(0, world_size, 0, 8)
        assert world_size / 8 / post_every_s(place) <= 6
    board = CountingBoard()
    [first, *others] = node(board, 8, 1024)
    for second in range(80):
        for rank, one in enumerate([first, *others]):
            one.beat(beat(rank), float(second))
    assert board.posts == 4, "128 nodes: every 21.3 s"


def test_who_posts_is_decided_by_who_was_heard_lately() -> None:
    assert is_poster(0, {}, 10.0) and is_poster(2, {3: 9.9, 2: 10.0}, 10.0)
    assert not is_poster(2, {1: 8.0}, 10.0) and is_poster(2, {1: 7.0}, 10.0)


def test_mail_of_a_node_arrives_once_and_a_rank_that_is_gone_does_not_matter() -> None:
    name = uuid.uuid4().hex
    boxes = [NodeMail(name, rank, 3) for rank in range(3)]
    boxes[0].send({"step": 1})
    boxes[0].send({"step": 2})
    assert boxes[1].receive() == {0: {"step": 2}} and boxes[1].receive() == {}
    boxes[2].close()
    boxes[0].send({"step": 3})
    assert boxes[1].receive() == {0: {"step": 3}}
    for _ in range(2000):
        boxes[1].send({"step": 4})  # nobody reads: the sender goes on
    boxes[0].close()
    boxes[1].close()


def test_a_rank_that_moved_moves_the_group_and_late_word_does_not_take_it_back() -> None:
    board = Board()
    board.post_beats([(beat(0, calls=9), 0.0)], 1.0)
    assert board.standing()[0].moved_at is None
    board.post_beats([(beat(0, calls=8), 5.0)], 1.0)
    assert board.standing()[0].moved_at is None and board.standing()[0].beats[0][0].calls == 9
    board.post_beats([(beat(0, calls=10), 0.0)], 1.0)
    assert board.standing()[0].moved_at is not None


def test_a_glance_does_not_grow_with_the_ranks_and_tells_what_is_overdue() -> None:
    board = Board()
    board.post_step(1)
    board.post_step(2)
    board.post_beats([(beat(rank), 0.0) for rank in range(1024)], 8.0)
    glance, now = board.glance()
    standing, _ = board.standing()
    assert glance.beats == {} and len(standing.beats) == 1024
    for later in (1.0, 100.0):
        assert is_overdue(glance, now + later, CONFIG) == is_overdue(standing, now + later, CONFIG) == (later > 50)


def hung(every_s: float, ages_s: dict[int, float], beats: dict[int, Beat]) -> Standing:
    standing = Standing(step=5, moved_at=0.0, beat_every_s=every_s)
    standing.step_times_s.append(1.0)
    standing.beats = {rank: (beats.get(rank, beat(rank)), 100.0 - age) for rank, age in ages_s.items()}
    return standing


def test_stuck_are_the_silent_else_those_that_compute_else_those_that_are_behind() -> None:
    fresh = {0: 1.0, 1: 1.0, 2: 1.0}
    assert [b.rank for b in find_stuck(hung(1.0, {**fresh, 2: 9.0}, {}), 100.0, CONFIG)] == [2]
    assert [b.rank for b in find_stuck(hung(1.0, fresh, {1: beat(1, waits_for=None)}), 100.0, CONFIG)] == [1]
    assert [b.rank for b in find_stuck(hung(1.0, fresh, {0: beat(0, calls=8)}), 100.0, CONFIG)] == [0]
    assert find_stuck(hung(1.0, fresh, {}), 10.0, CONFIG) == [], "not overdue"
    first_step = hung(1.0, fresh, {})
    first_step.step_times_s.clear()
    assert find_stuck(first_step, 100.0, CONFIG) == []


def test_large_groups_that_beat_less_often_are_not_taken_for_silent() -> None:
    """1,024 ranks told of themselves every 5 s and were silent after 5 s."""
    assert [b.rank for b in find_stuck(hung(8.0, {0: 7.9, 1: 7.0, 2: 30.0}, {}), 100.0, CONFIG)] == [2]
    assert hang_limit_s(hung(8.0, {}, {}), CONFIG) == 20.0, "a rank that stopped is silent by then"
    assert hang_limit_s(hung(1.0, {}, {}), CONFIG) == 18.0
