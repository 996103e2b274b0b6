"""When updates begin before the norm is known: a pure function of what steps were like."""

from __future__ import annotations

import pytest

from raydz.offload.speculation import Judgement


def after(judgement: Judgement, fires: list[bool], ahead_s: float = 0.6, residue_s: float = 0.03) -> Judgement:
    for fired in fires:
        judgement = judgement.after(fired, ahead_s, residue_s if fired else None)
    return judgement


def test_first_steps_speculate_whatever_happens():
    judgement = Judgement()
    for _ in range(3):
        assert judgement.pays
        judgement = after(judgement, [True])
    assert not judgement.pays


def test_the_first_estimates_are_plain_means():
    assert after(Judgement(), [True, False, False, True]).rollback_rate == pytest.approx(0.5)
    assert after(Judgement(), [True] * 5).rollback_rate == 1.0


def test_a_run_that_stops_to_clip_speculates_again():
    judgement = after(Judgement(), [True] * 50)
    assert not judgement.pays
    judgement = after(judgement, [False] * 4)
    assert judgement.pays and 0.5 < judgement.rollback_rate < 0.7


def test_break_even_is_where_time_lost_equals_time_won():
    # rate * residue = (1 - rate) * ahead
    judgement = after(Judgement(), [True, False] * 20, ahead_s=0.1, residue_s=0.1)
    assert judgement.break_even == pytest.approx(0.5)
    rarely = after(Judgement(), [True, False, False, False] * 20, ahead_s=0.1, residue_s=0.1)
    often = after(Judgement(), [False, True, True, True] * 20, ahead_s=0.1, residue_s=0.1)
    assert rarely.pays and not often.pays


@pytest.mark.parametrize(("mode", "pays"), [("speculative", True), ("waiting", False)])
def test_a_mode_that_is_asked_for_stays(mode, pays):
    assert after(Judgement(mode), [True] * 20).pays is pays
    assert after(Judgement(mode), [False] * 20).pays is pays
