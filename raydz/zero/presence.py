"""Which states of a sharded module were moved away, and what therefore cannot be done.

Neighbours: `sharded.py` inherits it; `moves.py` says what is away; whatever needs states asks here first.
"""

from __future__ import annotations

from raydz.errors import TrainingError
from raydz.zero.group import FlatGroup


class StatePresence:
    """Of the groups of a module.

    Attributes:
        absent: states that are away, under the names of `moves.MOVABLE`.
    """

    groups: list[FlatGroup]
    absent: frozenset[str] = frozenset()

    def set_absent(self, names: frozenset[str]) -> None:
        """Note which states are away from now on."""
        was_away, is_away = "lp_params" in self.absent, "lp_params" in names
        self.absent = names
        for group in self.groups if was_away != is_away else ():
            group.hide() if is_away else group.show()

    def require_present(self, what: str, *names: str) -> None:
        """Refuse `what` while states that it needs are moved away.

        Args:
            names: of these; none: any.

        Raises:
            TrainingError: they are.
        """
        missing = sorted(self.absent & set(names) if names else self.absent)
        if missing:
            raise TrainingError(
                f"{what} needs states that were moved to the host", got=", ".join(missing),
                wanted="all of them where they are used", remedy="call engine.reload_states() first",
            )  # fmt: skip
