"""Where each sample in flight is: at which stage and in which state, or nowhere (pure).

A sample is where its last record is: the search goes from the leaf back to the producer. Nowhere is
a sample whose stage has committed past its record and whose output is not there, or of which no
record is left at all: that is a loss, and an alarm (`delivery.md` rule 21).

It is free of false alarms where the facts were read in this order: ledger, commits, topics from the
first to the last, ledger again. What a commit calls done was written before the commit, so that the
later read of the output finds it; what has ended meanwhile is not in flight any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

UNWRITTEN_S = 60.0
"""For so long a group may be issued without its prompts, if a later one overtook it in the log."""


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
    """It reads samples and writes groups."""
    leaf: bool = False


class InFlight(NamedTuple):
    """A group that was issued and has not ended at the leaf."""

    n: int
    k: int
    partition: int
    since_s: float


class Place(NamedTuple):
    """Where sample (n, i) is, and since when."""

    n: int
    i: int
    stage: str
    state: State
    since_s: float
    why: str = ""


def locate(
    group: InFlight, path: Sequence[Stage], *, producer: str, newest_n: int, now_s: float
) -> list[Place]:
    """The places of all samples of a group, on the way from the producer to one leaf.

    `path` is without the producer, the leaf last. `newest_n` is the highest n of which the group's
    partition holds, or ever held, a prompt; -1 where none is known.
    """
    return [_locate(group, i, path, producer, newest_n, now_s) for i in range(group.k)]


def _locate(
    group: InFlight, i: int, path: Sequence[Stage], producer: str, newest_n: int, now_s: float
) -> Place:
    for stage in reversed(path):
        records = [found for found in stage.found.get(group.n, ()) if found.i in (None, i)]
        if records:
            return _at(group, i, stage, min(records))
    if group.n > newest_n or now_s - group.since_s < UNWRITTEN_S:
        return Place(group.n, i, producer, State.ISSUED, group.since_s)
    return Place(group.n, i, producer, State.NOWHERE, group.since_s,
                 "no topic holds a record of it: its prompt was never written, or was deleted")


def _at(group: InFlight, i: int, stage: Stage, record: Found) -> Place:
    committed = stage.committed.get(group.partition, Committed(0))

    def place(state: State, why: str = "") -> Place:
        return Place(group.n, i, stage.name, state, record.at_s, why)

    if record.offset < committed.offset:
        what = "did not end it" if stage.leaf else "wrote nothing of it"
        return place(State.NOWHERE, f"{stage.name} has passed its record (offset {record.offset}, "
                     f"committed {committed.offset}) and {what}")
    if stage.leaf:
        return place(State.BUFFERED)
    if stage.assembles and not _whole(group, stage):
        return place(State.OPEN)
    if committed.read_to is None:
        return place(State.WAITING)
    return place(State.RUNNING if record.offset < committed.read_to else State.QUEUED)


def _whole(group: InFlight, stage: Stage) -> bool:
    samples = {found.i for found in stage.found.get(group.n, ())}
    return None in samples or len(samples) >= group.k


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
