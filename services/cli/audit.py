"""Reads what `shared/whereabouts.py` needs to say where a run's samples are.

From the broker alone, so that it can be asked from anywhere: ledger, commits, the stages' topics,
ledger again, in this order (why: `shared/whereabouts.py`). Topics are read from when the oldest
group in flight was issued, as far as the broker can tell; headers only are looked at, those of
groups in flight only are kept. Without a group in flight no topic is read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
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
CLOCKS_S = 60.0
"""Records may be older than the group's issue by so much, by another machine's clock."""
CLOCKS_AGAIN_S = 3600.0
"""The same, where something was found nowhere and is looked for again."""


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
    first = _found(run, await _look(bus, run, CLOCKS_S))
    if not any(place.state is State.NOWHERE for found in first.places.values() for place in found):
        return first
    nowhere = {
        (leaf, place.n, place.i) for leaf, found in first.places.items() for place in found
        if place.state is State.NOWHERE
    }
    second = _found(run, await _look(bus, run, CLOCKS_AGAIN_S))
    return second._replace(places={
        leaf: [
            place for place in found
            if place.state is not State.NOWHERE or (leaf, place.n, place.i) in nowhere
        ]
        for leaf, found in second.places.items()
    })


class _Topic(NamedTuple):
    """One topic's records of groups that were in flight."""

    found: dict[int, list[Found]]
    """By n."""
    newest: dict[int, tuple[int, int]]
    """By partition, the highest (n, i)."""
    kept_from: dict[int, int]


class _Look(NamedTuple):
    """The facts, read in the order that makes them free of false alarms."""

    began_s: float
    issued_max: list[int]
    """By partition, when the look began."""
    wanted: dict[int, float]
    """The groups in flight when the look began, and when they were issued."""
    committed: dict[str, dict[int, Committed]]
    """By stage instance and partition."""
    topics: dict[str, _Topic]
    books: Ledger
    """As the look ended."""
    members: dict[str, int]


async def _look(bus: Bus, run: RunConfig, clocks_s: float) -> _Look:
    admin = bus.admin()
    await start(admin)
    try:
        async with LedgerReader(bus, run) as ledger:
            books, began_s = await ledger.catch_up(READ_S), time.time()
            issued_max = list(books.issued_max)
            wanted = {
                n: books.open_since_s(leaf, n) or 0.0
                for leaf in leaves(run.stages) for n in books.open_groups(leaf)
            }
            committed = {
                route.instance: await _commits(bus, run, route, admin)
                for route in run.stages if route.input
            }
            topics = {}
            for topic in _topics_in_order(run.stages):
                topics[topic] = await _topic(bus, run, topic, wanted, clocks_s)
            books = await ledger.catch_up(READ_S)
        members = await _members(bus, run, admin)
    finally:
        await stop(admin)
    return _Look(began_s, issued_max, wanted, committed, topics, books, members)


def _found(run: RunConfig, look: _Look) -> Audit:
    ways = {
        route.leaf: way_to(run.stages, route) for route in run.stages if route.leaf is not None
    }
    return Audit(
        look.books.books(),
        {leaf: _places(run, leaf, way, look) for leaf, way in ways.items()},
        {leaf: [route.instance for route in way] for leaf, way in ways.items()},
        look.members, time.time(),
    )


def _places(run: RunConfig, leaf: str, way: list[Route], look: _Look) -> list[Place]:
    producer, *readers = way
    path = [_stage(r, look.committed[r.instance], look.topics[r.input or ""]) for r in readers]
    newest = look.topics[producer.output or ""].newest
    found: list[Place] = []
    for n in look.books.open_groups(leaf):
        if n not in look.wanted:
            continue
        partition = n % run.partitions
        group = InFlight(
            n, look.books.samples(leaf, n), partition,
            look.books.open_since_s(leaf, n) or look.began_s, look.books.redrives(leaf, n),
        )
        last_n, last_i = newest.get(partition, (-1, -1))
        found += locate(
            group, path, producer=producer.instance, now_s=look.began_s,
            written_to=max((last_n, last_i + 1), (look.issued_max[partition], 0)),
        )
    return found


def _stage(route: Route, committed: dict[int, Committed], topic: _Topic) -> Stage:
    return Stage(
        route.instance, topic.found, committed, leaf=route.leaf is not None,
        assembles=route.service != "generator" and route.output is not None,
        kept_from=topic.kept_from,
    )


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


async def _topic(
    bus: Bus, run: RunConfig, kind: str, wanted: Mapping[int, float], clocks_s: float
) -> _Topic:
    """`wanted` maps n to when it was issued."""
    topic = _Topic({}, {}, {})
    if not wanted:
        return topic
    name = data_topic(run.prefix, run.run, run.pipeline, kind)
    async with LogReader(bus, name, range(run.partitions)) as log:
        topic.kept_from.update(await log.first(log.position))
        await log.since(min(wanted.values()) - clocks_s)
        async for records in log.to_end(READ_S):
            for record in records:
                _take(topic, record, wanted)
    return topic


def _take(topic: _Topic, record: ConsumerRecord, wanted: Mapping[int, float]) -> None:
    headers = list(record.headers)
    n, i = header_int(headers, "rs-group"), header_int(headers, "rs-sample")
    if n is None:
        return
    newest = topic.newest.get(record.partition, (-1, -1))
    topic.newest[record.partition] = max(newest, (n, -1 if i is None else i))
    if n in wanted:
        topic.found.setdefault(n, []).append(Found(
            record.offset, i, record.timestamp / 1000,
            header_int(headers, "rs-redrives") or 0, header_text(headers, TO),
        ))


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
