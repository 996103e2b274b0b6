"""One line of `raydz report`: what was looked at, how it stands, and how to mend it.

Neighbours: the modules of this folder make findings, `report.py` collects them, `main.py` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from raydz.errors import RaydzError

State = Literal["ok", "absent", "odd", "broken"]


@dataclass(frozen=True)
class Finding:
    """What was found out about one thing.

    Args:
        state: `ok`; `absent`: not here, and nothing is wrong with that; `odd`: works, but look at it; `broken`: missing
            or failing.
        remedy: one line on how to mend what is odd or broken, and only that.
    """

    name: str
    state: State
    detail: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        assert (self.remedy is not None) == (self.state in ("odd", "broken")), f"{self.name}: mend what is wrong"


def guarded(name: str, collect: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of `collect`; an exception becomes one that says so: a report must not end where trouble begins.

    Only our own errors and those of imports are quoted; the text of others may hold an address with a password in it.
    """
    found: list[Finding] = []
    try:
        found.extend(collect())
    except RaydzError as error:
        facts = ", ".join(str(fact) for fact in (error.where, error.got) if fact is not None)
        detail = f"{error.what} ({facts})" if facts else error.what
        found.append(Finding(name, "broken", detail, error.remedy or "mend what the line says"))
    except ImportError as error:
        found.append(Finding(name, "broken", str(error), "install what is missing, see the packages above"))
    except Exception as error:
        found.append(Finding(name, "broken", f"{type(error).__name__} while looking", f"try it by hand: {name}"))
    return found
