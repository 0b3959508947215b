"""The alert before a record of an unended group is deleted by its topic's retention.

A group's first record is as old as its `issued`; no record of it is older. So a group that has been
in flight for half of the shortest retention may lose its records as soon as the other half is over:
time to look at the stage that stands still.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple, Self

import structlog
from aiokafka.errors import KafkaError

from rollstream.shared.bus import Lost, start, stop
from rollstream.shared.ledger import Ledger
from rollstream.shared.metrics import GROUPS_IN_FLIGHT, OLDEST_GROUP, Metrics
from rollstream.shared.routes import leaves
from rollstream.shared.service import RunContext
from rollstream.shared.topics import shortest_retention_s

WARN_SHARE = 0.5
LOOK_EVERY_S = 5.0
TELL_EVERY_S = 60.0


class Expiring(NamedTuple):
    """Groups in flight that may lose records."""

    groups: int
    oldest_n: int
    age_s: float
    left_s: float
    """Until records of the oldest one may be gone; negative where they may be gone already."""


def oldest(books: Ledger, leaves: Iterable[str], now_s: float) -> tuple[int, float] | None:
    """The group that has been in flight for the longest, and for how many seconds."""
    ages = [(since_s, n) for n, since_s in _in_flight(books, leaves)]
    return (min(ages)[1], now_s - min(ages)[0]) if ages else None


def expiring(
    books: Ledger, leaves: Iterable[str], retention_s: float | None, now_s: float
) -> Expiring | None:
    """What to warn of; None where nothing is near its end, or records are kept for ever."""
    if retention_s is None:
        return None
    limit_s = now_s - WARN_SHARE * retention_s
    near = [(since_s, n) for n, since_s in _in_flight(books, leaves) if since_s <= limit_s]
    if not near:
        return None
    since_s, n = min(near)
    return Expiring(len({n for _, n in near}), n, now_s - since_s, since_s + retention_s - now_s)


def _in_flight(books: Ledger, leaves: Iterable[str]) -> Iterable[tuple[int, float]]:
    for leaf in leaves:
        for n in books.open_groups(leaf):
            if (since_s := books.open_since_s(leaf, n)) is not None:
                yield n, since_s


class ExpiryWatch:
    """Looks at the books of one run from time to time, and tells the log and the metrics."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._leaves = leaves(context.run.stages)
        self._retention_s: float | None = None
        self._looked_s = self._told_s = float("-inf")
        self._age_s: float | None = None
        self._in_flight = 0.0
        metrics = Metrics(context.run.pipeline, context.route.instance)
        self._gauges = [
            metrics.gauge(OLDEST_GROUP, lambda: self._age_s),
            metrics.gauge(GROUPS_IN_FLIGHT, lambda: self._in_flight),
        ]

    async def __aenter__(self) -> Self:
        """Ask the broker how long it keeps what. Raises Lost."""
        context = self._context
        names = [context.topic(route.output) for route in context.run.stages if route.output]
        admin = context.bus.admin()
        try:
            await start(admin)
            self._retention_s = await shortest_retention_s(admin, names)
        except (KafkaError, TimeoutError) as error:
            raise Lost.because("how long topics keep records", error) from error
        finally:
            await stop(admin)
        return self

    async def __aexit__(self, *_: object) -> None:
        for unregister in self._gauges:
            unregister()

    def look(self, books: Ledger) -> None:
        """Measure what is in flight; an error line, once a minute, while groups may expire."""
        if time.monotonic() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s, now_s = time.monotonic(), time.time()
        found = oldest(books, self._leaves, now_s)
        self._age_s = found[1] if found else 0.0
        self._in_flight = max(len(books.open_groups(leaf)) for leaf in self._leaves)
        warned = expiring(books, self._leaves, self._retention_s, now_s)
        if warned is not None and self._looked_s - self._told_s >= TELL_EVERY_S:
            self._told_s = self._looked_s
            structlog.get_logger().error(
                "groups in flight may lose their records: see `rollstream ledger` for the stage",
                run=self._context.run.run, retention_s=self._retention_s, **warned._asdict(),
            )
