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


def test_the_last_item_is_known_after_one_pass() -> None:
    order: UseOrder[str] = UseOrder()
    order.begin(Pass.FORWARD)
    order.advance("a")
    assert not order.is_last("a")
    order.advance("b")
    order.begin(Pass.FORWARD)
    assert order.is_last("b") and not order.is_last("a")


def test_before_any_pass_there_is_no_hint() -> None:
    order: UseOrder[str] = UseOrder()
    assert order.advance("a") == [] and not order.is_last("a")
