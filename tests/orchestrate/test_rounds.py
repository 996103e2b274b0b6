"""Rounds of an attempt, without a cluster: who starts anew when, and what is no longer heard."""

from __future__ import annotations

import pytest

from raydz.orchestrate.rounds import Order, Report, Rounds, most_telling
from raydz.orchestrate.supervisor import report_of


def report(rank: int, *, is_echo: bool = False) -> Report:
    return Report(rank, "raised", f"rank {rank}", is_echo=is_echo)


def test_a_round_begins_once_and_forgets_the_reports_and_the_store_of_the_one_before() -> None:
    rounds = Rounds()
    rounds.announce_store(0, "host", 1234)
    rounds.report(0, report(1))
    version = rounds.view.version
    assert rounds.begin(Order(1, failures=1))
    assert not rounds.begin(Order(1, failures=1)), "two causes of one end are one round"
    assert rounds.view.version > version and rounds.view.store is None and rounds.reports == []


def test_word_of_an_earlier_round_has_no_effect() -> None:
    rounds = Rounds()
    rounds.begin(Order(1))
    rounds.announce_store(0, "old", 1)
    rounds.report(0, report(0))
    rounds.done(0, 0, 1)
    assert rounds.view.store is None and rounds.reports == [] and rounds.view.end is None


def test_the_attempt_ends_when_all_ranks_of_one_round_are_done() -> None:
    rounds = Rounds()
    rounds.done(0, 0, 2)
    rounds.begin(Order(1))
    rounds.done(1, 1, 2)
    rounds.done(1, 1, 2)
    assert rounds.view.end is None, "rank 0 was done in the round before"
    rounds.done(1, 0, 2)
    assert rounds.view.end == "finished"
    assert not rounds.begin(Order(2))


def test_what_was_given_up_stays_so() -> None:
    rounds = Rounds()
    rounds.give_up("a bug")
    rounds.give_up("another")
    rounds.done(0, 0, 1)
    assert (rounds.view.end, rounds.view.reason) == ("given up", "a bug") and not rounds.begin(Order(1))


def test_every_change_is_a_new_version_and_nothing_else_is() -> None:
    rounds = Rounds()
    versions = [rounds.view.version]
    for change in (
        lambda: rounds.announce_store(0, "host", 1), lambda: rounds.begin(Order(1)), lambda: rounds.give_up("x"),
    ):  # fmt: skip
        change()
        versions.append(rounds.view.version)
    assert versions == sorted(set(versions))
    rounds.report(1, report(0))
    assert rounds.view.version == versions[-1]


def test_the_report_that_names_the_cause_counts_before_its_echoes() -> None:
    echoes = [report(0, is_echo=True), report(2, is_echo=True)]
    assert most_telling([*echoes, report(1)]).rank == 1
    assert most_telling(echoes).rank == 0


@pytest.mark.parametrize(
    ("status", "kills", "kind", "words"),
    [
        (9, 0, "killed", "ended by SIGKILL"),
        (9, 1, "out of memory", "the host was out of memory"),
        (11, 1, "killed", "ended by SIGSEGV"),
        (70 << 8, 0, "raised", "exit code 70"),
        (0, 0, "raised", "exit code 0 and said nothing"),
    ],
)
def test_a_process_that_said_nothing_is_told_by_how_it_ended(status, kills, kind, words) -> None:
    found = report_of(3, status, kills)
    assert found.kind == kind and words in found.cause and "rank 3" in found.cause and not found.is_echo
