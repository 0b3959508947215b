"""Which groups make the next batch, and which batch the trainer has. Pure.

A batch is exactly `batch_size` samples; a group is never split. The oldest version goes first, then
the lowest n, over all partitions (`delivery.md` rules 19 and 23).
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from rollstream.shared.control import Acked, Offered, PolicyVersion
from rollstream.shared.records import Group


class Pool:
    """Scored groups that wait for the trainer."""

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._groups: dict[int, Group] = {}
        self._reserved: dict[int, Group] = {}
        self._order: list[tuple[int, int]] = []

    def add(self, group: Group) -> None:
        """Take a group in; one that is here already is left as it is."""
        if group.n in self._groups or group.n in self._reserved:
            return
        self._groups[group.n] = group
        heapq.heappush(self._order, (group.oldest_version or 0, group.n))

    def take_stale(self, version: int) -> list[Group]:
        """Remove the groups with a token that is more than `max_staleness` versions old."""
        found = []
        while self._order and version - self._order[0][0] > self._max_staleness:
            _, n = heapq.heappop(self._order)
            if (group := self._groups.get(n)) is None:
                continue
            if group.oldest_version is None:  # text only: it has no age
                heapq.heappush(self._order, (version, n))
                continue
            found.append(self._groups.pop(n))
        return found

    def reserve_next(self) -> list[Group] | None:
        """Set the next batch's groups apart; None where they don't make a whole batch yet."""
        chosen, samples, passed = [], 0, []
        while self._order and samples < self._batch_size:
            entry = heapq.heappop(self._order)
            group = self._groups.get(entry[1])
            if group is None:
                continue
            passed.append(entry)
            if samples + group.k <= self._batch_size:
                chosen.append(group)
                samples += group.k
        if samples < self._batch_size:
            chosen = []
        taken = {group.n for group in chosen}
        for entry in passed:
            if entry[1] not in taken:
                heapq.heappush(self._order, entry)
        for group in chosen:
            self._reserved[group.n] = self._groups.pop(group.n)
        return chosen or None

    def reserve(self, numbers: list[int]) -> list[Group] | None:
        """Set the groups of a batch apart that was offered before; None unless all are here."""
        if not all(n in self._groups for n in numbers):
            return None
        for n in numbers:
            self._reserved[n] = self._groups.pop(n)
        return [self._reserved[n] for n in numbers]

    def release(self, n: int) -> Group | None:
        """Let go of a group, waiting or reserved."""
        return self._groups.pop(n, None) or self._reserved.pop(n, None)

    def take_all(self) -> list[Group]:
        """Remove all that wait and are not reserved, by number."""
        found = [self._groups[n] for n in sorted(self._groups)]
        self._groups.clear()
        self._order.clear()
        return found

    def __len__(self) -> int:
        """Groups that wait."""
        return len(self._groups)


class Placed(NamedTuple):
    """A batch and where on the control topic it was offered."""

    offered: Offered
    offset: int


class BatchBook:
    """What the control topic says of batches and versions so far: a fold in log order.

    The first `offered` of a batch id counts, whoever wrote it: a sink that lost its role without
    knowing finds its own offer refused.
    """

    def __init__(self) -> None:
        self.batches: dict[int, Placed] = {}
        self.acked: set[int] = set()
        self.version = 0
        self.epoch = 0
        self.announced = False
        """The trainer tells its versions itself; implied ones no longer count."""
        self.registered = False

    def apply(self, offset: int, record: object) -> None:
        """Take the next record of the control topic in; other kinds change nothing."""
        match record:
            case Offered():
                self.batches.setdefault(record.batch_id, Placed(record, offset))
                self.registered = True
            case Acked():
                self.acked.add(record.batch_id)
            case PolicyVersion():
                self._move_on(record)
                self.registered = True

    def _move_on(self, record: PolicyVersion) -> None:
        if record.implied and self.announced:
            return
        if record.implied:  # counted up, never down: applied twice is as good as once
            self.version = max(self.version, record.version)
            return
        self.epoch = max(self.epoch, record.epoch)
        self.announced = True
        self.version = record.version

    @property
    def next_id(self) -> int:
        return max(self.batches, default=-1) + 1

    def unacknowledged(self) -> list[Offered]:
        """Batches that were offered and not acknowledged, in order."""
        return [placed.offered for id, placed in sorted(self.batches.items())
                if id not in self.acked]
