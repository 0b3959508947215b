"""Work that a partition's old owner is probably still finishing: it is done last (rule 9).

Pure. What was dispatched before a revoke may still come out of the member that lost the partition.
The new owner waits with it, looks at the output now and then, and does what is left when the old
owner's time is over: a rebalance gives it `HANDOVER_S`, a member that leaves says its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rollstream.shared.intake import Work
from rollstream.shared.partition import Partition

HANDOVER_S = 60.0
"""How long a partition's old owner may go on finishing what it had when it lost it."""


class _Waiting(NamedTuple):
    work: Work
    until_s: float


class Handover:
    """The work that waits, for `longest_s` at most."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._waiting: list[_Waiting] = []

    def add(self, work: Work, now_s: float, going_on_s: float) -> None:
        """It may come out of its old owner for so long yet."""
        self._waiting.append(_Waiting(work, now_s + min(going_on_s, self._longest_s)))

    @property
    def partitions(self) -> set[int]:
        """Whose outputs are worth another look."""
        return {waiting.work.partition for waiting in self._waiting}

    def due(self, now_s: float, machines: Mapping[int, Partition]) -> list[Work]:
        """What is still open when its time is over; what was finished meanwhile is forgotten."""
        open_now = [
            waiting for waiting in self._waiting
            if (machine := machines.get(waiting.work.partition)) is not None
            and machine.in_flight(waiting.work.unit)
        ]
        due = [waiting.work for waiting in open_now if now_s >= waiting.until_s]
        self._waiting = [waiting for waiting in open_now if now_s < waiting.until_s]
        return due

    def clear(self) -> None:
        """The assignment changed: everything is read again."""
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)
