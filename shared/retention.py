"""Which groups can never reach a stage any more, because their records were deleted unread.

Asked only where a stage finds that its input begins after its position. A group is lost here when
the ledger has it in flight, no stage before this one may still bring it, and neither the input nor
the own output holds a record of it. The stage then ends it itself, as dropped(retention): nothing
that was issued is silently forgotten (`delivery.md` rule 24).

The order of reading makes a false loss impossible: first the ledger, then what the stages before
have ahead of them, first to last, and the own input at the end. What moves on meanwhile is found
further down; what cannot be told apart from a group that may still come counts as coming.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rollstream.shared.codec import header_int
from rollstream.shared.commits import read_commits
from rollstream.shared.ledger import Ledger
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.log_reader import LogReader
from rollstream.shared.records import RETENTION, EnvRef, Failure, G, Kind, Rollout, Row, Stop
from rollstream.shared.routes import Route, leaves, way_to
from rollstream.shared.runs import RunConfig
from rollstream.shared.seen import Unit
from rollstream.shared.service import RunContext

FAILURE = Failure(RETENTION, "its record was deleted before it was read: the topic's retention is "
                  "shorter than the outage was")
READ_S = 600.0
UNWRITTEN_S = 600.0
"""With no prompt left to compare with, a group issued more recently may not be written yet."""


class LostUnit(NamedTuple):
    """A sample, or a group of k of them, that this stage must end without input."""

    unit: Unit
    k: int


def lost_units(
    in_flight: Mapping[int, int], coming: set[int], present: set[Unit],
    settled: Callable[[Unit], bool], *, samples: bool,
) -> list[LostUnit]:
    """The units that a stage must end without input; pure.

    `in_flight` maps n to k. Where the stage works on `samples` each missing one is a unit of its
    own. Else a group of which any record is `present` is not lost: if others are missing, its
    deadline ends it (rule 15).
    """
    found: list[LostUnit] = []
    for n, k in sorted(in_flight.items()):
        units = [Unit(n, i) for i in range(k)] if samples else [Unit(n)]
        found += [
            LostUnit(unit, k) for unit in units
            if n not in coming and unit not in present and not settled(unit)
        ]
    return found


def ended_as_lost(
    produces: type[Rollout] | type[G], run: RunConfig, lost: LostUnit
) -> Rollout | G:
    """The record that a lost unit ends in; nothing is known of it but its number."""
    common: dict[str, Any] = {
        "run": run.run, "pipeline": run.pipeline, "n": lost.unit.n, "k": lost.k,
        "env": EnvRef(id=""), "row": Row(prompt=[]),
    }
    if issubclass(produces, Rollout):
        return Rollout(**common, i=lost.unit.i or 0, stop=Stop.ERROR, error=FAILURE)
    return produces(**common, kind=Kind.DROPPED, reason=RETENTION, detail=FAILURE.message)


async def find_lost(
    context: RunContext, partitions: Iterable[int], settled: Callable[[Unit], bool], *,
    samples: bool = False,
) -> dict[int, list[LostUnit]]:
    """Per partition, the units that can never reach this stage any more. Raises Lost."""
    run, wanted = context.run, sorted(partitions)
    books = await read_ledger(context.bus, run, READ_S)
    in_flight = {
        p: {n: k for n, k in _open(books, run.stages).items() if n % run.partitions == p}
        for p in wanted
    }
    coming = await _unwritten(context, books, wanted, in_flight)
    for route in way_to(run.stages, context.route)[1:-1]:
        coming |= await _ahead(context, route, wanted)
    present = await _units(context, context.route, dict.fromkeys(wanted, 0), samples=samples)
    return {
        p: lost_units(in_flight[p], coming, present, settled, samples=samples) for p in wanted
    }


def _open(books: Ledger, stages: list[Route]) -> dict[int, int]:
    return {
        n: books.samples(leaf, n) for leaf in leaves(stages) for n in books.open_groups(leaf)
    }


async def _unwritten(
    context: RunContext, books: Ledger, partitions: list[int],
    in_flight: Mapping[int, Mapping[int, int]],
) -> set[int]:
    """Groups whose prompts their producer may still have to write: the newest of a partition."""
    source = next(s for s in context.run.stages if s.input is None)
    reader = next(s for s in context.run.stages if s.input == source.output)
    written = await _units(context, reader, dict.fromkeys(partitions, 0))
    newest = dict.fromkeys(partitions, -1)
    for unit in written:
        p = unit.n % context.run.partitions
        newest[p] = max(newest[p], unit.n)
    names, now_s = leaves(context.run.stages), time.time()

    def recent(n: int) -> bool:
        since = [s for leaf in names if (s := books.open_since_s(leaf, n)) is not None]
        return now_s - max(since, default=0.0) < UNWRITTEN_S

    return {
        n for p in partitions for n in in_flight[p]
        if n > newest[p] and (newest[p] >= 0 or recent(n))
    }


async def _ahead(context: RunContext, route: Route, partitions: list[int]) -> set[int]:
    """Groups of which a stage has records at or above what it has committed."""
    commits = await read_commits(RunContext(context.run, route, context.bus), partitions)
    starts = {p: commits[p].offset if p in commits else 0 for p in partitions}
    found = await _units(context, route, starts)
    return {unit.n for unit in found}


async def _units(
    context: RunContext, route: Route, starts: Mapping[int, int], *, samples: bool = False
) -> set[Unit]:
    """What a stage's input holds from these offsets on: groups, or also which samples of them."""
    found: set[Unit] = set()
    async with LogReader(context.bus, context.topic(route.input or ""), starts) as log:
        first = await log.first(starts)
        log.position = {p: max(first[p], offset) for p, offset in starts.items()}
        async for records in log.to_end(READ_S):
            for record in records:
                headers = list(record.headers)
                if (n := header_int(headers, "rs-group")) is not None:
                    found.add(Unit(n, header_int(headers, "rs-sample") if samples else None))
    return found
