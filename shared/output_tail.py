"""Reads what a stage has written itself: from a position to its end, or the last few records.

All that was acknowledged before the call is seen by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiokafka import ConsumerRecord

from rollstream.shared.bus import Bus
from rollstream.shared.log_reader import Gone, LogReader


async def read_to_end(
    bus: Bus,
    topic: str,
    starts: Mapping[int, int],
    take: Callable[[ConsumerRecord], None],
    *,
    timeout_s: float = 600.0,
    gone: Callable[[int, int], None],
) -> None:
    """Give each record from the partitions' start positions on to `take`.

    A start that the log does not reach is told to `gone`, with the first kept offset, and that
    partition is read from there instead; `take` may see a record twice then. Raises Lost past the
    deadline.
    """
    if not starts:
        return
    async with LogReader(bus, topic, starts) as log:
        log.position = dict(starts)
        while True:
            try:
                async for records in log.to_end(timeout_s):
                    for record in records:
                        take(record)
                return
            except Gone as error:
                first = await log.first(error.partitions)
                for partition in error.partitions:
                    gone(partition, first[partition])
                log.position |= first


async def last_records(
    bus: Bus, topic: str, partitions: int, count: int, *, timeout_s: float = 120.0
) -> dict[int, list[ConsumerRecord]]:
    """The last `count` records of each partition, and what comes meanwhile. Raises Lost."""
    found: dict[int, list[ConsumerRecord]] = {p: [] for p in range(partitions)}
    async with LogReader(bus, topic, found) as log:
        first = await log.first(found)
        log.position = dict(first)
        ends = await log.ends(timeout_s)
        log.position = {p: max(first[p], ends[p] - count) for p in found}
        async for records in log.to_end(timeout_s):
            for record in records:
                found[record.partition].append(record)
    return found
