"""The self-test against stores that misbehave, each in one way."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydz.errors import StorageError
from raydz.storage.local import LocalStore
from raydz.storage.probe import probe


class Forgetful(LocalStore):
    """Returns other bytes than it was given."""

    def get(self, *args, **kwargs) -> bytes:
        return super().get(*args, **kwargs)[::-1]


class Rangeless(LocalStore):
    """Answers every read with the whole object."""

    def get(self, key, *args, **kwargs) -> bytes:
        return super().get(key)


class Overwriting(LocalStore):
    """Ignores the condition of a put."""

    def put(self, key, data, *, if_absent=False) -> None:
        super().put(key, data)


class Undeletable(Overwriting):
    """Ignores the condition, and forbids deletes on top."""

    def delete(self, keys) -> None:
        raise StorageError("no deletes here")


class Unconditional(LocalStore):
    """Answers conditional puts with an error, as Swift does (HTTP 501)."""

    def put(self, key, data, *, if_absent=False) -> None:
        if if_absent:
            raise StorageError("the store does not know this operation")
        super().put(key, data)


@pytest.mark.parametrize("kind", [Overwriting, Unconditional])
def test_a_store_without_conditions_may_be_allowed(tmp_path: Path, kind: type[LocalStore]) -> None:
    with pytest.raises(StorageError):
        probe(kind(tmp_path))
    assert probe(kind(tmp_path), requires_conditions=False) is False
    assert probe(LocalStore(tmp_path), requires_conditions=False) is True
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Forgetful, "other bytes"),
        (Rangeless, "other bytes"),
        (Overwriting, "two jobs could overwrite each other"),
        (Undeletable, "two jobs could overwrite each other"),
    ],
)
def test_a_store_that_breaks_a_promise_is_refused_with_the_first_cause(
    tmp_path: Path, kind: type[LocalStore], words: str
) -> None:
    with pytest.raises(StorageError, match=words):
        probe(kind(tmp_path))


@pytest.mark.parametrize("kind", [Forgetful, Rangeless, Overwriting])
def test_a_failed_probe_leaves_nothing(tmp_path: Path, kind: type[LocalStore]) -> None:
    with pytest.raises(StorageError):
        probe(kind(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_store_without_deletes_is_refused(tmp_path: Path) -> None:
    class ReadOnlyAfterwards(LocalStore):
        def delete(self, keys) -> None:
            raise StorageError("no deletes here")

    with pytest.raises(StorageError, match="no deletes here"):
        probe(ReadOnlyAfterwards(tmp_path))
