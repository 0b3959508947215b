"""Putting parked groups back: which letters can be, and the record that does it (pure).

Order of writing: the group record to the input of the instance that parked it, `redriven` to the
ledger, then the run's state, where it was done. Each record says how many redrives it makes: a
stage works on a parked group only when it comes with more than it was parked with, and the books
count a group as parked only at its last try. So whatever is cut off in between is made good:

    after the record    the books still have it parked, or already what came of it; the next redrive
                        writes both again, and the stage knows the second record
    after `redriven`    it is in flight in the books and its record is there; if the run is done,
                        the next redrive opens it, though it finds nothing to put back
    two at once         both write the same try: it is worked on once, and counted once

The other order could leave a group in flight for ever whose record was never written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from rollstream.shared.codec import Undecodable, decode, header_int
from rollstream.shared.dead_letters import slot_rollout
from rollstream.shared.ledger import Ledger
from rollstream.shared.records import DeadLetter, Group, Input, Rollout, group_of
from rollstream.shared.routes import Route, leaves_after
from rollstream.shared.runs import RunConfig, Status

TO = "to"
"""Header of a record that is put back: the one instance that takes it."""


class State(StrEnum):
    """What has become of a dead letter's group."""

    PARKED = "parked"
    """It waits: `redrive` puts it back."""
    IN_FLIGHT = "in flight"
    """Its stage has not passed it on as parked, or the sink has not read that: not yet."""
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
        if not is_evidence(found.letter) and (
            before is None or found.letter.redrives >= before.letter.redrives
        ):
            newest[found.key] = found
    return [(found, _state(found, newest.get(found.key), books, stages)) for found in letters]


def is_evidence(letter: DeadLetter) -> bool:
    """Whether it holds what never was a group: a record of nobody, or an unreadable sample."""
    samples = (header_int(one.headers, "rs-sample") is not None for one in letter.inputs)
    return letter.n < 0 or (letter.error.type == "undecodable" and any(samples))


def _state(
    found: Letter, newest: Letter | None, books: Ledger, stages: Sequence[Route]
) -> State:
    letter = found.letter
    if is_evidence(letter):
        return State.EVIDENCE
    if newest is not found:
        return State.SUPERSEDED
    leaves = leaves_after(stages, letter.stage)
    if leaves and all(books.ended(leaf, letter.n) for leaf in leaves):
        return State.ENDED
    if any(books.redrives(leaf, letter.n) > letter.redrives for leaf in leaves):
        return State.REDRIVEN
    if any(books.parked_try(leaf, letter.n) == letter.redrives for leaf in leaves):
        return State.PARKED
    return State.IN_FLIGHT


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


def records_in(inputs: Iterable[Input], run: RunConfig) -> list[Rollout | Group]:
    """The letter's inputs as records; a sample that can't be read stays the error that it was.

    Raises NotRedrivable.
    """
    records: list[Rollout | Group] = []
    for one in inputs:
        try:
            body = decode(one.value, one.headers)
        except Undecodable as error:
            n = header_int(one.headers, "rs-group")
            if n is None or header_int(one.headers, "rs-sample") is None:
                raise NotRedrivable(
                    f"the record at {one.offset} can't be read: {error}"
                ) from error
            body = slot_rollout(run, one.headers, n, str(error))
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


def opened_again(reason: str) -> tuple[Status, str]:
    """The state, and its reason, of a run that had ended with this reason, for what was put back.

    One that was stopped is opened as stopped: it admits nothing new.
    """
    if reason.startswith("stopped"):
        return Status.STOPPED, "stopped; redriven groups"
    return Status.RUNNING, "redriven groups"
