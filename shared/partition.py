"""One input partition of one stage, as a pure machine: what is read, in flight, done.

The loop tells it what happens (assign, read, finished, revoke) and it answers what to do. It holds
rules 4 to 9 of `delivery.md`: the stage's own output is the truth, the commit only shortens the
read; a duplicate is recognised for ever; work that outlived a rebalance is adopted, not repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from rollstream.shared.frontier import Frontier, Hint
from rollstream.shared.seen import Seen, Unit


class Verdict(Enum):
    """What to do with a record that was read."""

    WORK = auto()
    """New: dispatch it."""
    JOINED = auto()
    """Its unit is in flight already: it will be done together with it."""
    KNOWN = auto()
    """Settled before: nothing to do, its offset is done."""
    LATER = auto()
    """Its old owner is probably still finishing it: dispatch it last (rule 9)."""


class Commit(NamedTuple):
    """What to commit for a partition."""

    offset: int
    hint: Hint


class _Held(NamedTuple):
    """An input record that was read and is not done."""

    offset: int
    redrives: int = 0


class Partition:
    """The state of one assigned partition.

    Invariant: everything below `out_position` of the own output is in `seen`; so a hint never hides
    what a zombie has written between our own records.

    Made anew at each assignment, from the committed offset and hint; then `found` is called for
    each record of the own output from `out_position` on, then `read` for each input record.
    """

    def __init__(
        self, partitions: int, *, committed: int | None = None, hint: Hint | None = None
    ) -> None:
        hint = hint or Hint()
        self.seen = Seen(partitions, hint.seen)
        self._frontier = Frontier(committed or 0)
        self._in_flight: dict[Unit, list[_Held]] = {}
        self._out_position = hint.out_position
        self._acknowledged: set[int] = set()
        """Own output above a gap: somebody else wrote there too, and we have not read it."""
        self._dispatched_to = hint.dispatched_to
        self.going_on_s = hint.going_on_s
        """For how long an old owner may go on with what it had."""
        self._last_commit: tuple[int, int, int] | None = None

    @property
    def out_position(self) -> int:
        """Where to read the own output from, at an assignment."""
        return self._out_position

    @property
    def next_offset(self) -> int:
        """Where to read the input from."""
        return self._frontier.next_offset

    def found(self, unit: Unit, k: int, offset: int, *, parked: int | None = None) -> None:
        """The own output holds this unit at this offset; it is read in order.

        `parked`: the try (`redrives`) at which it was parked; None where it was not.
        """
        self._out_position = max(self._out_position, offset + 1)
        self._acknowledged -= {o for o in self._acknowledged if o <= offset}
        self._close_gap()
        self._settle(unit, k, parked)

    def read(self, offset: int, unit: Unit, redrives: int = 0) -> Verdict:
        """An input record was read; its offset is the unit's to finish.

        A parked group is worked on again when it comes with more redrives than it was parked with.
        """
        self._frontier.add(offset)
        if self.knows(unit, redrives):
            self._frontier.done(offset)
            return Verdict.KNOWN
        if unit in self._in_flight:
            self._in_flight[unit].append(_Held(offset, redrives))
            return Verdict.JOINED
        self._in_flight[unit] = [_Held(offset, redrives)]
        return Verdict.LATER if offset < self._dispatched_to else Verdict.WORK

    def deleted(self, units: Sequence[Unit], first: int) -> None:
        """The log begins at `first` now, and these units lay before it: they must end without it.

        Each holds the frontier at a deleted offset until its output is acknowledged. Called before
        the first read.
        """
        gone = range(self.next_offset, first)
        for at, unit in zip(gone, units, strict=False):
            self.hold(at, unit)
        for unit in units[len(gone):]:
            self._in_flight[unit] = [_Held(gone[-1])]
        self._frontier.skip_to(first)

    def hold(self, offset: int, unit: Unit) -> None:
        """An input record that settles nothing, but must be dealt with before it is passed."""
        self._frontier.add(offset)
        self._in_flight[unit] = [_Held(offset)]

    def skip(self, offset: int) -> None:
        """An input record that is nobody's work here."""
        self._frontier.add(offset)
        self._frontier.done(offset)

    def finished(
        self, unit: Unit, k: int, out_offset: int, *, parked: int | None = None
    ) -> None:
        """The unit's output is acknowledged at this offset of the own output partition.

        With k = 0 it had none: what was held is let go, and nothing is settled.
        """
        if out_offset >= self._out_position:
            self._acknowledged.add(out_offset)
            self._close_gap()
        self._settle(unit, k, parked)

    def _close_gap(self) -> None:
        while self._out_position in self._acknowledged:
            self._acknowledged.remove(self._out_position)
            self._out_position += 1

    @property
    def has_gap(self) -> bool:
        """Whether the own output holds records that were neither written nor read here.

        For a moment after acknowledgements came out of order; for longer where a member that lost
        the partition still finishes what it had. Until they are read, the hint stays below them.
        """
        return bool(self._acknowledged)

    def _settle(self, unit: Unit, k: int, parked: int | None) -> None:
        if parked is not None:
            self.seen.park(unit.n, parked)
        elif k > 0:
            self.seen.add(unit, k)
        held = self._in_flight.pop(unit, [])
        # A park settles its own try and those before: one that was put back since is still to do.
        waiting = [one for one in held if parked is not None and one.redrives > parked]
        if waiting:
            self._in_flight[unit] = waiting
        for one in held:
            if one not in waiting:
                self._frontier.done(one.offset)

    def knows(self, unit: Unit, redrives: int = 0) -> bool:
        """Whether the unit is settled, or set aside at this try or a later one."""
        return self.seen.has(unit) or self.seen.is_parked(unit.n, redrives)

    def in_flight(self, unit: Unit) -> bool:
        return unit in self._in_flight

    def commit(self, *, going_on_s: float = 0.0) -> Commit | None:
        """What to commit, or None where nothing changed since the last time.

        `going_on_s`: the partition is about to be another's, and what was dispatched is finished
        here, within this time. After a kill nobody has said so: it is dispatched again at once.
        """
        mark = (self._frontier.position, self._frontier.next_offset, self._out_position)
        if mark == self._last_commit and not going_on_s:
            return None
        self._last_commit = mark
        dispatched_to = 0
        if going_on_s:
            dispatched_to = max(
                self._dispatched_to, self._frontier.next_offset if self._in_flight else 0
            )
            going_on_s = max(going_on_s, self.going_on_s)
        hint = Hint(
            self._out_position, self.seen.state(), dispatched_to,
            read_to=self._frontier.next_offset, going_on_s=going_on_s,
        )
        return Commit(self._frontier.position, hint)

    def commit_failed(self) -> None:
        """The last commit did not arrive: offer it again."""
        self._last_commit = None

    @property
    def open_offsets(self) -> int:
        """Records that were read and are not done."""
        return len(self._frontier)

    def __len__(self) -> int:
        """Units in flight."""
        return len(self._in_flight)
