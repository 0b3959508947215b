"""Putting parked groups back: which letters can be, and the record that does it (pure).

A redrive appends one group record, with all its rollouts, to the input partition of the instance
that parked it, then `redriven` to the ledger, then opens the run again where it was done. Each
record says how many redrives it makes: a stage works on a parked group only when it comes with more
than it was parked with, and the books count a group as parked only at its last try. So the order in
which these records are seen changes nothing, a redrive that was cut off in between is completed by
the next one, and two at once close the group once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from rollstream.shared.codec import Undecodable, decode
from rollstream.shared.ledger import Ledger
from rollstream.shared.records import DeadLetter, Group, Input, Rollout, group_of
from rollstream.shared.routes import Route, leaves_after

TO = "to"
"""Header of a record that is put back: the one instance that takes it."""


class State(StrEnum):
    """What has become of a dead letter's group."""

    PARKED = "parked"
    """It waits: `redrive` puts it back."""
    REDRIVEN = "redriven"
    """It was put back and has not ended."""
    ENDED = "ended"
    EVIDENCE = "evidence"
    """Kept to be looked at: an undecodable record closed its slot as an error."""
    SUPERSEDED = "superseded"
    """A later letter of the same group and stage counts."""


class Letter(NamedTuple):
    """A dead letter and where it lies in the topic of dead letters."""

    partition: int
    offset: int
    letter: DeadLetter

    @property
    def key(self) -> tuple[str, int]:
        return self.letter.stage, self.letter.n


def states(
    letters: Sequence[Letter], books: Ledger, stages: Sequence[Route]
) -> list[tuple[Letter, State]]:
    """Each letter with what the ledger says of its group, in the order given."""
    newest: dict[tuple[str, int], Letter] = {}
    for found in letters:
        before = newest.get(found.key)
        if before is None or found.letter.redrives >= before.letter.redrives:
            newest[found.key] = found
    return [(found, _state(found, newest[found.key], books, stages)) for found in letters]


def _state(found: Letter, newest: Letter, books: Ledger, stages: Sequence[Route]) -> State:
    letter = found.letter
    if letter.n < 0 or letter.error.type == "undecodable":
        return State.EVIDENCE
    if newest is not found:
        return State.SUPERSEDED
    leaves = leaves_after(stages, letter.stage)
    if leaves and all(books.ended(leaf, letter.n) for leaf in leaves):
        return State.ENDED
    if any(books.redrives(leaf, letter.n) > letter.redrives for leaf in leaves):
        return State.REDRIVEN
    return State.PARKED


class Filter(NamedTuple):
    """Which parked groups to take; None means any."""

    stage: str | None = None
    error: str | None = None
    first_n: int | None = None
    last_n: int | None = None
    since_ms: int | None = None
    until_ms: int | None = None

    def takes(self, letter: DeadLetter) -> bool:
        return (
            self.stage in (None, letter.stage)
            and self.error in (None, letter.error.type)
            and (self.first_n is None or letter.n >= self.first_n)
            and (self.last_n is None or letter.n <= self.last_n)
            and (self.since_ms is None or letter.at_ms >= self.since_ms)
            and (self.until_ms is None or letter.at_ms <= self.until_ms)
        )


class NotRedrivable(ValueError):
    """The letter's inputs give no group; the message says why."""


def records_in(inputs: Iterable[Input]) -> list[Rollout | Group]:
    """The letter's inputs as records. Raises NotRedrivable."""
    records: list[Rollout | Group] = []
    for one in inputs:
        try:
            body = decode(one.value, list(one.headers))
        except Undecodable as error:
            raise NotRedrivable(f"the record at {one.offset} can't be read: {error}") from error
        if isinstance(body, Rollout | Group):
            records.append(body)
    return records


def group_record(letter: DeadLetter, records: Iterable[Rollout | Group]) -> Group:
    """The one record that puts the letter's group back. Raises NotRedrivable."""
    rollouts: list[Rollout] = []
    for record in records:
        if isinstance(record, Group):
            return msgspec.structs.replace(record, redrives=letter.redrives + 1)
        rollouts.append(record)
    if not rollouts:
        raise NotRedrivable("it holds no rollout and no group")
    return msgspec.structs.replace(
        group_of(sorted(rollouts, key=lambda rollout: rollout.i)), redrives=letter.redrives + 1
    )
