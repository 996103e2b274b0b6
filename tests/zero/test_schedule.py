"""The recorded order of uses is a hint: what followed the item last time, or nothing."""

from __future__ import annotations

from raydz.zero.schedule import Pass, UseOrder


def run(order: UseOrder[str], kind: Pass, items: str) -> list[str]:
    order.begin(kind)
    return ["".join(order.advance(item)) for item in items]


def test_the_first_pass_knows_nothing_and_the_second_knows_what_follows() -> None:
    order: UseOrder[str] = UseOrder()
    assert run(order, Pass.FORWARD, "abc") == ["", "", ""]
    assert run(order, Pass.FORWARD, "abc") == ["bc", "c", ""]


def test_each_kind_of_pass_has_its_own_history() -> None:
    order: UseOrder[str] = UseOrder()
    run(order, Pass.FORWARD, "abc")
    run(order, Pass.BACKWARD, "cba")
    run(order, Pass.EVALUATE, "xy")
    assert run(order, Pass.FORWARD, "a") == ["bc"]
    assert run(order, Pass.BACKWARD, "c") == ["ba"]
    assert run(order, Pass.EVALUATE, "x") == ["y"]


def test_an_item_used_twice_is_found_after_its_last_use() -> None:
    order: UseOrder[str] = UseOrder()
    run(order, Pass.FORWARD, "aba")
    assert run(order, Pass.FORWARD, "aba") == ["ba", "a", ""]


def test_an_unexpected_item_gives_no_hint_and_the_next_expected_one_does() -> None:
    order: UseOrder[str] = UseOrder()
    run(order, Pass.FORWARD, "abcd")
    assert run(order, Pass.FORWARD, "azcb") == ["bcd", "", "d", ""]


def test_a_shorter_pass_replaces_the_history() -> None:
    order: UseOrder[str] = UseOrder()
    run(order, Pass.FORWARD, "abc")
    run(order, Pass.FORWARD, "ac")
    assert run(order, Pass.FORWARD, "a") == ["c"]


def test_an_empty_pass_leaves_the_history() -> None:
    order: UseOrder[str] = UseOrder()
    run(order, Pass.FORWARD, "ab")
    run(order, Pass.FORWARD, "")
    assert run(order, Pass.FORWARD, "a") == ["b"]


SIZES, MOST = {"a": 1, "b": 20, "c": 300}.__getitem__, 10**9


def test_the_distance_to_the_next_use_goes_through_the_rest_of_the_pass_and_the_backward_after_it() -> None:
    order: UseOrder[str] = UseOrder()
    run(order, Pass.FORWARD, "abc")
    run(order, Pass.BACKWARD, "cba")
    order.begin(Pass.FORWARD)
    found = {}
    for item in "abc":
        order.advance(item)
        found[item] = order.distance(item, SIZES, MOST)
    assert found == {"a": 20 + 300 + 300 + 20, "b": 300 + 300, "c": 0}


def test_a_use_that_is_too_far_off_is_not_looked_for() -> None:
    order: UseOrder[str] = UseOrder()
    run(order, Pass.FORWARD, "ab")
    run(order, Pass.BACKWARD, "ba")
    order.begin(Pass.FORWARD)
    order.advance("a")
    assert [order.distance("a", SIZES, most) for most in (39, 40)] == [None, 40]


def test_a_second_use_in_the_same_pass_is_the_next_one() -> None:
    order: UseOrder[str] = UseOrder()
    run(order, Pass.FORWARD, "aba")
    run(order, Pass.BACKWARD, "aba")
    order.begin(Pass.FORWARD)
    order.advance("a")
    assert order.distance("a", SIZES, MOST) == 20


def test_without_history_no_distance_is_known() -> None:
    order: UseOrder[str] = UseOrder()
    order.begin(Pass.FORWARD)
    order.advance("a")
    assert order.distance("a", SIZES, MOST) is None
    run(order, Pass.FORWARD, "a")
    assert order.distance("a", SIZES, MOST) is None  # no backward has been seen
    run(order, Pass.BACKWARD, "b")
    order.begin(Pass.FORWARD)
    order.advance("a")
    assert order.distance("a", SIZES, MOST) is None  # none of what backward used


def test_before_any_pass_there_is_no_hint() -> None:
    order: UseOrder[str] = UseOrder()
    assert order.advance("a") == [] and order.distance("a", SIZES, MOST) is None
