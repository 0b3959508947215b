"""What becomes of a group at a sink: each group is decided once, by the first record that settles.

Pure. `parked` settles nothing: the first scored or dropped record after it does (`delivery.md`
rules 4 and 17).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rollstream.shared.codec import Headers, header_int
from rollstream.shared.records import RETENTION, Ended, Group, Kind, Outcome
from rollstream.shared.seen import Seen, Unit

BELOW_MIN_SCORE = "below_min_score"
UNDECODABLE = "undecodable"


class Decision(NamedTuple):
    """How group n ends at a leaf, with the group where there is one to keep."""

    n: int
    outcome: Outcome
    reason: str = ""
    group: Group | None = None
    redrives: int = 0
    """Of a parked group: which try it was."""

    def ended(self, leaf: str) -> Ended:
        """As the ledger's record; rewards of a delivered group are summed over its samples."""
        delivered = self.group is not None and self.outcome is Outcome.DELIVERED
        rewards = rewards_of(self.group) if delivered and self.group else []
        return Ended(
            n=self.n, leaf=leaf, outcome=self.outcome, reason=self.reason,
            reward_sum=sum(rewards), reward_count=len(rewards), redrives=self.redrives,
        )


def rewards_of(group: Group) -> list[float]:
    """The rewards of the samples that have one: a failure is never a reward of 0."""
    return [sample.reward for sample in group.samples if sample.reward is not None]


class Decider:
    """The decisions of one partition, in log order.

    `seen` holds the groups that have ended already; it is taken over, not copied.
    """

    def __init__(self, seen: Seen, *, min_score: float | None = None) -> None:
        self.seen = seen
        self._min_score = min_score

    def decide(self, group: Group) -> Decision | None:
        """The decision that this record brings, None for a duplicate."""
        if group.kind is Kind.PARKED:
            if self.knows(group.n, group.redrives):
                return None
            self.seen.park(group.n, group.redrives)
            reason = group.reason or "parked"
            return Decision(group.n, Outcome.PARKED, reason, group, group.redrives)
        if self.ended(group.n):
            return None
        self.seen.add_group(group.n)
        if group.kind is Kind.DROPPED:
            return Decision(group.n, Outcome.DROPPED, group.reason or "dropped", group)
        return self._filtered(group)

    def decide_undecodable(self, headers: Headers) -> Decision | None:
        """A record that can't be read still ends its group, where its headers name one."""
        n = header_int(headers, "rs-group")
        if n is None or n < 0 or self.ended(n):
            return None
        self.seen.add_group(n)
        return Decision(n, Outcome.DROPPED, UNDECODABLE)

    def decide_lost(self, n: int, reason: str = RETENTION) -> Decision | None:
        """A group whose record, or what it refers to, was deleted before it was read."""
        if self.ended(n):
            return None
        self.seen.add_group(n)
        return Decision(n, Outcome.DROPPED, reason)

    def ended(self, n: int) -> bool:
        """Whether the group has ended here: nothing changes that."""
        return self.seen.has(Unit(n))

    def knows(self, n: int, redrives: int = 0) -> bool:
        """Whether it has ended here, or is set aside at this try or a later one."""
        return self.ended(n) or self.seen.is_parked(n, redrives)

    def _filtered(self, group: Group) -> Decision:
        if self._min_score is None:
            return Decision(group.n, Outcome.DELIVERED, "", group)
        kept = [s for s in group.samples if s.reward is not None and s.reward >= self._min_score]
        if not kept:
            return Decision(group.n, Outcome.DROPPED, BELOW_MIN_SCORE, group)
        return Decision(
            group.n, Outcome.DELIVERED, "", msgspec.structs.replace(group, samples=kept)
        )
