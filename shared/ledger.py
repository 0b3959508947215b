"""The books of a run: a pure fold of its ledger, from which every count is derived.

Per leaf, at every prefix of every ledger partition (`delivery.md` rule 21):

    issued = delivered + dropped + parked + in flight

The first end of a group at a leaf wins; `parked` is no end. Duplicates change nothing. Memory grows
with what is in flight, not with what ever was: ended groups are a watermark.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from rollstream.shared.records import Ended, Issued, Outcome, Redriven
from rollstream.shared.seen import Seen, Unit


class LeafBooks(NamedTuple):
    """How a run stands at one leaf: groups, unless a name says samples."""

    leaf: str
    issued: int
    delivered: int
    dropped: dict[str, int]
    """By reason."""
    parked: int
    in_flight: int
    issued_samples: int
    in_flight_samples: int
    reward_sum: float
    reward_count: int
    """Rewards of delivered groups, in samples."""

    @property
    def ended(self) -> int:
        """Groups that have ended for good."""
        return self.delivered + sum(self.dropped.values())

    @property
    def balanced(self) -> bool:
        """Whether the identity holds and nothing is negative."""
        ended = self.delivered + sum(self.dropped.values()) + self.parked
        return self.issued == ended + self.in_flight and self.in_flight >= 0


class Ledger:
    """What was issued and how it ended, per leaf.

    `leaves` are the names of the run's sinks; what another leaf writes is left aside, as is a
    record in a partition that is not its group's (`strangers` counts both).
    """

    def __init__(self, leaves: list[str], partitions: int) -> None:
        self._partitions = partitions
        self._issued = [Seen(partitions) for _ in range(partitions)]
        self._leaves = {leaf: _Leaf(partitions) for leaf in leaves}
        self._issued_samples = 0
        self.issued_max = [-1] * partitions
        """The highest issued n of each partition, -1 where there is none."""
        self.restored = 0
        """Issued groups whose ends come from an earlier log of the run."""
        self.strangers = 0

    def apply(
        self, partition: int, record: Issued | Ended | Redriven, at_s: float = 0.0
    ) -> None:
        """Take the next record of a ledger partition in; `at_s` is its own time."""
        if record.n < 0 or record.n % self._partitions != partition:
            self.strangers += 1
        elif isinstance(record, Issued):
            self._issue(partition, record, at_s)
        elif isinstance(record, Redriven):
            for name in record.leaves or self._leaves:
                if name in self._leaves:
                    self._leaves[name].redrive(record, at_s)
        elif record.leaf in self._leaves:
            self._leaves[record.leaf].end(record)
        else:
            self.strangers += 1

    def _issue(self, partition: int, record: Issued, at_s: float) -> None:
        if self._issued[partition].has(Unit(record.n)):
            return
        self._issued[partition].add_group(record.n)
        self.issued_max[partition] = max(self.issued_max[partition], record.n)
        self._issued_samples += record.k
        self.restored += record.restored
        for leaf in self._leaves.values():
            leaf.issue(record.n, record.k, at_s)

    def issued(self, n: int) -> bool:
        """Whether group n exists."""
        return self._issued[n % self._partitions].has(Unit(n))

    def ended(self, leaf: str, n: int) -> bool:
        """Whether the ledger holds group n's end at the leaf, issued already or not."""
        return self._leaves[leaf].ended(n)

    def set_aside(self, leaf: str, n: int, redrives: int) -> bool:
        """Whether the ledger holds that this try of group n was parked, or a later one began."""
        found = self._leaves[leaf]
        return found.parked.get(n, -1) >= redrives or found.redriven.get(n, 0) > redrives

    def redrives(self, leaf: str, n: int) -> int:
        """How often group n was put back for this leaf, as long as it has no end there."""
        return self._leaves[leaf].redriven.get(n, 0)

    def ended_groups(self, leaf: str) -> list[Seen]:
        """Per partition, the groups that have ended at the leaf: a copy to go on from."""
        return [Seen(self._partitions, s.state()) for s in self._leaves[leaf].final]

    def books(self) -> list[LeafBooks]:
        """One line of books a leaf, in the order of the routing."""
        issued = sum(len(seen) for seen in self._issued)
        return [
            LeafBooks(
                leaf=name, issued=issued, delivered=leaf.delivered, dropped=dict(leaf.dropped),
                parked=leaf.parked_count, in_flight=len(leaf.open) - leaf.parked_count,
                issued_samples=self._issued_samples, in_flight_samples=leaf.in_flight_samples,
                reward_sum=leaf.reward_sum, reward_count=leaf.reward_count,
            )
            for name, leaf in self._leaves.items()
        ]

    def outstanding_samples(self, leaf: str) -> int:
        """Samples that are issued and neither delivered nor dropped nor parked."""
        return self._leaves[leaf].in_flight_samples

    def open_groups(self, leaf: str) -> list[int]:
        """The groups in flight: issued, not ended, not parked; in order."""
        found = self._leaves[leaf]
        return sorted(n for n in found.open if not found.is_parked(n))

    def samples(self, leaf: str, n: int) -> int:
        """The group size of a group that is open, 0 for any other."""
        found = self._leaves[leaf].open.get(n)
        return found.k if found else 0

    def open_since_s(self, leaf: str, n: int) -> float | None:
        """When a group in flight was issued, or put back; None where it is not in flight."""
        found = self._leaves[leaf]
        return found.open[n].since_s if n in found.open and not found.is_parked(n) else None

    def parked_groups(self, leaf: str) -> list[int]:
        """The groups that are set aside and not put back, in order."""
        found = self._leaves[leaf]
        return sorted(n for n in found.parked if n in found.open and found.is_parked(n))

    def parked_try(self, leaf: str, n: int) -> int | None:
        """The try at which group n was set aside and not put back since; None for any other."""
        found = self._leaves[leaf]
        waits = n in found.open and n in found.parked and found.is_parked(n)
        return found.parked[n] if waits else None

    def ended_unissued(self, leaf: str) -> list[int]:
        """Groups that ended in an earlier log and are not issued in this one yet, in order.

        The sink writes their ends when it starts, the producer answers with `issued{restored}`.
        """
        return sorted(self._leaves[leaf].early)

    @property
    def next_n(self) -> int:
        """The number of the group that comes next: one above the highest issued."""
        return max(self.issued_max, default=-1) + 1

    @property
    def missing(self) -> list[int]:
        """Numbers below `next_n` that were never issued, in order: a producer died between."""
        end = self.next_n
        return sorted(
            n
            for partition, seen in enumerate(self._issued)
            for n in range(partition + seen.watermark * self._partitions, end, self._partitions)
            if not seen.has(Unit(n))
        )


class _Open(NamedTuple):
    """A group that was issued and has no end."""

    k: int
    since_s: float


class _Leaf:
    """One leaf's side of the books."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self.final = [Seen(partitions) for _ in range(partitions)]
        self.open: dict[int, _Open] = {}
        """Issued and not ended, parked ones too, by n."""
        self.parked: dict[int, int] = {}
        """Set aside, issued already or not: the try at which it was."""
        self.redriven: dict[int, int] = {}
        """Put back and not ended: how often. Above the parked try it is in flight again."""
        self.early: dict[int, Ended] = {}
        """Ends that came before their group was issued: of an earlier log."""
        self.delivered = 0
        self.dropped: Counter[str] = Counter()
        self.reward_sum = 0.0
        self.reward_count = 0

    def ended(self, n: int) -> bool:
        return self.final[n % self._partitions].has(Unit(n))

    def issue(self, n: int, k: int, at_s: float) -> None:
        early = self.early.pop(n, None)
        if early is None:
            self.open[n] = _Open(k, at_s)
        else:
            self._count(early)

    def redrive(self, record: Redriven, at_s: float) -> None:
        n = record.n
        if self.ended(n) or record.redrives <= self.redriven.get(n, 0):
            return
        self.redriven[n] = record.redrives
        if n in self.open:
            self.open[n] = self.open[n]._replace(since_s=at_s)

    def is_parked(self, n: int) -> bool:
        return self.parked.get(n, -1) >= self.redriven.get(n, 0)

    def end(self, record: Ended) -> None:
        if self.ended(record.n):
            return
        if record.outcome is Outcome.PARKED:
            self.parked[record.n] = max(record.redrives, self.parked.get(record.n, 0))
            return
        self.final[record.n % self._partitions].add_group(record.n)
        self.parked.pop(record.n, None)
        self.redriven.pop(record.n, None)
        if self.open.pop(record.n, None) is None:
            self.early[record.n] = record
        else:
            self._count(record)

    def _count(self, record: Ended) -> None:
        if record.outcome is Outcome.DELIVERED:
            self.delivered += 1
            self.reward_sum += record.reward_sum
            self.reward_count += record.reward_count
        else:
            self.dropped[record.reason or "unknown"] += 1

    @property
    def parked_count(self) -> int:
        return sum(1 for n in self.parked if n in self.open and self.is_parked(n))

    @property
    def in_flight_samples(self) -> int:
        """Summed anew: what is open is bounded by admission."""
        return sum(found.k for n, found in self.open.items() if not self.is_parked(n))
