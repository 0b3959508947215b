"""Reads what `shared/whereabouts.py` needs to say where a run's samples are.

From the broker alone, so that it can be asked from anywhere: ledger, commits, the stages' topics
(headers only are looked at, of groups in flight only are kept), ledger again, in this order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from aiokafka import ConsumerRecord
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from rollstream.shared.bus import Bus, start, stop
from rollstream.shared.codec import header_int, header_text
from rollstream.shared.commits import ANSWER_S, ask_commits
from rollstream.shared.frontier import decode_hint
from rollstream.shared.ledger import LeafBooks, Ledger
from rollstream.shared.ledger_reader import LedgerReader
from rollstream.shared.log_reader import LogReader
from rollstream.shared.redrive import TO
from rollstream.shared.routes import Route, leaves, way_to
from rollstream.shared.runs import RunConfig
from rollstream.shared.service import RunContext
from rollstream.shared.topics import data_topic
from rollstream.shared.watchdog import limit_s
from rollstream.shared.whereabouts import (
    Committed,
    Found,
    InFlight,
    Place,
    Stage,
    State,
    locate,
)

READ_S = 300.0


class Audit(NamedTuple):
    """What was found out about one run."""

    books: list[LeafBooks]
    places: dict[str, list[Place]]
    """By leaf."""
    stages: dict[str, list[str]]
    """By leaf, the stages on its way, the producer first."""
    members: dict[str, int]
    """How many processes attend each stage, as far as the broker says."""
    at_s: float


async def audit(bus: Bus, run: RunConfig) -> Audit:
    """Where everything is; what is found nowhere was looked for twice. Raises Lost, KafkaError."""
    first = await _look(bus, run)
    if not any(place.state is State.NOWHERE for found in first.places.values() for place in found):
        return first
    nowhere = {
        (leaf, place.n, place.i) for leaf, found in first.places.items() for place in found
        if place.state is State.NOWHERE
    }
    second = await _look(bus, run)
    return second._replace(places={
        leaf: [
            place for place in found
            if place.state is not State.NOWHERE or (leaf, place.n, place.i) in nowhere
        ]
        for leaf, found in second.places.items()
    })


async def _look(bus: Bus, run: RunConfig) -> Audit:
    admin = bus.admin()
    await start(admin)
    try:
        async with LedgerReader(bus, run) as ledger:
            books = await ledger.catch_up(READ_S)
            issued_then = {n for leaf in leaves(run.stages) for n in books.open_groups(leaf)}
            committed = {
                route.instance: await _commits(bus, run, route, admin)
                for route in run.stages if route.input
            }
            topics = {}
            for topic in _topics_in_order(run.stages):
                topics[topic] = await _topic(bus, run, topic, issued_then)
            books = await ledger.catch_up(READ_S)
        members = await _members(bus, run, admin)
    finally:
        await stop(admin)
    now_s, places, ways = time.time(), {}, {}
    for route in run.stages:
        if route.leaf is None:
            continue
        way = way_to(run.stages, route)
        ways[route.leaf] = [way_route.instance for way_route in way]
        open_groups = [n for n in books.open_groups(route.leaf) if n in issued_then]
        places[route.leaf] = [
            place for n in open_groups
            for place in _locate(run, books, route.leaf, n, way, committed, topics, now_s)
        ]
    return Audit(books.books(), places, ways, members, now_s)


class _Topic(NamedTuple):
    """One topic's records of groups that were in flight."""

    found: dict[int, list[tuple[Found, int, str | None]]]
    """By n: the record, its redrives, and the one instance that it is for, if any."""
    newest_n: dict[int, int]
    """By partition."""


def _locate(
    run: RunConfig, books: Ledger, leaf: str, n: int, way: list[Route],
    committed: dict[str, dict[int, Committed]], topics: dict[str, _Topic], now_s: float,
) -> list[Place]:
    redrives = books.redrives(leaf, n)
    path = []
    for route in way[1:]:
        records = [
            found for found, tries, to in topics[route.input or ""].found.get(n, ())
            # What came of an earlier try is settled: it was parked.
            if tries >= redrives and to in (None, route.instance)
        ]
        path.append(Stage(
            route.instance, {n: records} if records else {}, committed[route.instance],
            assembles=any(found.i is not None for found in records)
            and route.service != "generator" and route.output is not None,
            leaf=route.leaf is not None,
        ))
    partition = n % run.partitions
    group = InFlight(
        n, books.samples(leaf, n), partition, books.open_since_s(leaf, n) or now_s
    )
    newest = topics[way[0].output or ""].newest_n.get(partition, -1)
    return locate(group, path, producer=way[0].instance, newest_n=newest, now_s=now_s)


def _topics_in_order(stages: list[Route]) -> Iterator[str]:
    """The stages' outputs, those nearer to the producer first."""
    ready: list[str | None] = [None]
    while ready:
        reached = ready.pop(0)
        for route in stages:
            if route.input == reached and route.output:
                yield route.output
                ready.append(route.output)


async def _commits(
    bus: Bus, run: RunConfig, route: Route, admin: AIOKafkaAdminClient
) -> dict[int, Committed]:
    commits = await ask_commits(admin, RunContext(run, route, bus), range(run.partitions))
    found: dict[int, Committed] = {}
    for p, commit in commits.items():
        hint = decode_hint(commit.metadata)
        if hint is None:
            found[p] = Committed(commit.offset)
        elif hint.log_id == run.log_id:
            found[p] = Committed(commit.offset, hint.read_to)
    return found


async def _topic(bus: Bus, run: RunConfig, kind: str, wanted: set[int]) -> _Topic:
    topic = _Topic({}, {})
    name = data_topic(run.prefix, run.run, run.pipeline, kind)
    async with LogReader(bus, name, range(run.partitions)) as log:
        await log.rewind()
        async for records in log.to_end(READ_S):
            for record in records:
                _take(topic, record, wanted)
    return topic


def _take(topic: _Topic, record: ConsumerRecord, wanted: set[int]) -> None:
    headers = list(record.headers)
    n = header_int(headers, "rs-group")
    if n is None:
        return
    topic.newest_n[record.partition] = max(n, topic.newest_n.get(record.partition, -1))
    if n not in wanted:
        return
    tries = header_int(headers, "rs-redrives") or 0
    found = Found(record.offset, header_int(headers, "rs-sample"), record.timestamp / 1000)
    to = header_text(headers, TO)
    topic.found.setdefault(n, []).append((found, tries, to))


async def _members(bus: Bus, run: RunConfig, admin: AIOKafkaAdminClient) -> dict[str, int]:
    """Empty where the broker does not say."""
    groups = {RunContext(run, r, bus).group: r.instance for r in run.stages}
    found: dict[str, int] = {}
    try:
        asked = admin.describe_consumer_groups(list(groups))
        answers: Any = await asyncio.wait_for(asked, ANSWER_S)
        for answer in answers:
            for _, name, _, _, _, members, *_ in answer.groups:
                found[groups[name]] = len(members)
    except (KafkaError, TimeoutError, AttributeError, ValueError, KeyError):
        return {}
    return found


def stuck(run: RunConfig, found: Audit, leaf: str) -> list[tuple[Place, float]]:
    """What has been where it is for longer than its stage may take, and that limit in seconds."""
    services = {route.instance: route.service for route in run.stages}
    limits = {name: limit_s(service, run) for name, service in services.items()}

    def limit(place: Place) -> float:
        if place.state in (State.OPEN, State.BUFFERED):
            return run.deadlines.group_s + limits[place.stage]
        return limits[place.stage]

    return [
        (place, limit(place)) for place in found.places[leaf]
        if place.state is not State.NOWHERE and found.at_s - place.since_s > limit(place)
    ]
