"""Assembles groups from their samples, in log order.

The first k distinct i of group n close it. Nothing here waits: a group whose samples never come is
closed by its deadline, which counts in *log time* (`delivery.md` rule 15), so that an outage does
not drop what was finished before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class OpenGroup(Generic[T]):
    """A group that has some of its samples."""

    n: int
    k: int
    first_timestamp_s: float
    members: dict[int, T] = field(default_factory=dict)
    size_bytes: int = 0

    def complete(self) -> list[T] | None:
        """All k members by i, or None while some are missing."""
        if len(self.members) < self.k:
            return None
        return [self.members[i] for i in sorted(self.members)]


class Assembler(Generic[T]):
    """The open groups of one partition.

    Invariants: of a sample that comes twice the first one counts; a closed group is forgotten here
    (the caller's Seen remembers it); `log_time_s` never goes back.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._open: dict[int, OpenGroup[T]] = {}
        self.size_bytes = 0
        """Of all members in open groups."""
        self.log_time_s = 0.0
        self._at_end_since_s: float | None = None

    def add(
        self, n: int, i: int, k: int, member: T, *, timestamp_s: float, size_bytes: int = 0
    ) -> list[T] | None:
        """Take a sample in; the whole group, ordered by i, when this one completes it."""
        self.log_time_s = max(self.log_time_s, timestamp_s)
        self._at_end_since_s = None
        group = self._open.setdefault(n, OpenGroup(n, k, timestamp_s))
        if i in group.members or not 0 <= i < group.k:
            return None
        group.members[i] = member
        group.size_bytes += size_bytes
        self.size_bytes += size_bytes
        whole = group.complete()
        if whole is not None:
            self.discard(n)
        return whole

    def at_end(self, now_s: float) -> None:
        """The reader stands at the partition's end: from now on wall time counts too."""
        if self._at_end_since_s is None:
            self._at_end_since_s = now_s

    def expired(self, now_s: float) -> list[OpenGroup[T]]:
        """Groups whose deadline has passed in log time; only at the partition's end.

        They stay open: the caller asks whether their missing prompts are still being worked on, and
        calls `discard` for those that it closes.
        """
        if self._at_end_since_s is None:
            return []
        log_now_s = self.log_time_s + (now_s - self._at_end_since_s)
        return [
            group for group in self._open.values()
            if log_now_s - group.first_timestamp_s >= self._deadline_s
        ]

    def discard(self, n: int) -> None:
        """Forget an open group: it was closed by other means."""
        if (group := self._open.pop(n, None)) is not None:
            self.size_bytes -= group.size_bytes

    def __len__(self) -> int:
        return len(self._open)

    @property
    def members(self) -> int:
        """How many samples lie in open groups."""
        return sum(len(group.members) for group in self._open.values())
