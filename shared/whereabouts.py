"""Where each sample in flight is: at which stage and in which state, or nowhere (pure).

A sample is where its last record is: the search goes from the leaf back to the producer. Nowhere is
a sample whose stage has committed past its record and whose output is not there, or of which no
record is left at all: that is a loss, and an alarm (`delivery.md` rule 21).

It is free of false alarms where the facts were read in this order: ledger, commits, topics from the
first to the last, ledger again. What a commit calls done was written before the commit, so that the
later read of the output finds it; what moves on while topics are read is found further down; what
has ended meanwhile is not in flight any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

UNWRITTEN_S = 60.0
"""For so long a sample may be issued without its prompt, though a later one is written."""


class State(StrEnum):
    """What a stage has to do with a sample."""

    ISSUED = "issued"
    """At the producer: its prompt is not written yet."""
    QUEUED = "queued"
    """Not read yet."""
    RUNNING = "running"
    """Read, and not finished."""
    WAITING = "waiting"
    """Queued or running: the broker keeps no hints that tell them apart."""
    OPEN = "open"
    """It waits for its siblings."""
    BUFFERED = "buffered"
    """At the leaf, which has not ended it yet."""
    NOWHERE = "nowhere"


class Found(NamedTuple):
    """A record in a stage's input: of one sample, or of a whole group (i None)."""

    offset: int
    i: int | None
    at_s: float
    redrives: int = 0
    to: str | None = None
    """The one stage instance that it is for, where it is not for every reader."""


class Committed(NamedTuple):
    """What a stage has said of one partition of its input."""

    offset: int
    read_to: int | None = None


class Stage(NamedTuple):
    """A stage on the way to a leaf, with what its input holds of the groups in flight."""

    name: str
    found: Mapping[int, Sequence[Found]]
    committed: Mapping[int, Committed]
    """By partition."""
    assembles: bool = False
    """It makes groups of samples."""
    leaf: bool = False
    kept_from: Mapping[int, int] = MappingProxyType({})
    """By partition, the first offset that its input still holds."""


class InFlight(NamedTuple):
    """A group that was issued and has not ended at the leaf."""

    n: int
    k: int
    partition: int
    since_s: float
    redrives: int = 0
    """How often it was put back for this leaf: what came of an earlier try is settled."""


class Place(NamedTuple):
    """Where sample (n, i) is, and since when."""

    n: int
    i: int
    stage: str
    state: State
    since_s: float
    why: str = ""


def locate(
    group: InFlight, path: Sequence[Stage], *, producer: str, written_to: tuple[int, int],
    now_s: float,
) -> list[Place]:
    """The places of all samples of a group, on the way from the producer to one leaf.

    `path` is without the producer, the leaf last. `written_to` is the first (n, i) of the group's
    partition whose prompt may not be written yet: prompts are written in this order, and those of
    one group before the next is issued. `now_s` is when the look began.
    """
    return [_locate(group, i, path, producer, written_to, now_s) for i in range(group.k)]


def _locate(
    group: InFlight, i: int, path: Sequence[Stage], producer: str,
    written_to: tuple[int, int], now_s: float,
) -> Place:
    for at in reversed(range(len(path))):
        if records := _records(group, i, path[at]):
            return _at(group, i, path[at], records[0], path[at + 1:])
    if (group.n, i) >= written_to or now_s - group.since_s < UNWRITTEN_S:
        return Place(group.n, i, producer, State.ISSUED, group.since_s)
    return Place(group.n, i, producer, State.NOWHERE, group.since_s,
                 "no topic holds a record of it: its prompt was never written, or was deleted"
                 + _deleted_unread(group, path))


def _records(group: InFlight, i: int | None, stage: Stage) -> list[Found]:
    """What the stage's input holds for it of the group's present try, of one sample or of all."""
    return sorted(
        (found for found in stage.found.get(group.n, ())
         if found.redrives >= group.redrives and found.to in (None, stage.name)
         and (i is None or found.i in (None, i))),
        key=lambda found: found.offset,
    )


def _at(
    group: InFlight, i: int, stage: Stage, record: Found, further: Sequence[Stage]
) -> Place:
    committed = stage.committed.get(group.partition, Committed(0))

    def place(state: State, why: str = "") -> Place:
        return Place(group.n, i, stage.name, state, record.at_s, why)

    if record.offset < committed.offset:
        what = "did not end it" if stage.leaf else "wrote nothing of it, or it was deleted"
        return place(State.NOWHERE, f"{stage.name} has passed its record (offset {record.offset}, "
                     f"committed {committed.offset}) and {what}{_deleted_unread(group, further)}")
    if stage.leaf:
        return place(State.BUFFERED)
    if stage.assembles and record.i is not None and not _whole(group, stage):
        return place(State.OPEN)
    if committed.read_to is None:
        return place(State.WAITING)
    return place(State.RUNNING if record.offset < committed.read_to else State.QUEUED)


def _whole(group: InFlight, stage: Stage) -> bool:
    samples = {found.i for found in _records(group, None, stage)}
    return None in samples or len(samples) >= group.k


def _deleted_unread(group: InFlight, stages: Sequence[Stage]) -> str:
    for stage in stages:
        committed = stage.committed.get(group.partition)
        kept_from = stage.kept_from.get(group.partition, 0)
        if committed is not None and committed.offset < kept_from:
            return (f" ({stage.name} has read to offset {committed.offset} and its input begins at "
                    f"{kept_from} now: when it runs it ends what is missing as retention)")
    return ""


class Row(NamedTuple):
    """What one stage has of a leaf's samples in flight."""

    stage: str
    counts: Mapping[State, int]
    oldest_s: float


def table(places: Iterable[Place], stages: Sequence[str], now_s: float) -> list[Row]:
    """A row for each stage, in their order, of what is somewhere."""
    held = [place for place in places if place.state is not State.NOWHERE]
    rows = []
    for stage in stages:
        mine = [place for place in held if place.stage == stage]
        counts = {state: sum(place.state is state for place in mine) for state in State}
        rows.append(Row(stage, counts, max((now_s - p.since_s for p in mine), default=0.0)))
    return rows
