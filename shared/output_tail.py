"""Reads a partition from a position to the end it has now.

The end is the high water that a fetch reports: `end_offsets` of the embedded broker is wrong after
a batch. All that was acknowledged before the call is seen by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from rollstream.shared.bus import Bus, Lost, start, stop


async def read_to_end(
    bus: Bus,
    starts: Mapping[TopicPartition, int],
    take: Callable[[TopicPartition, ConsumerRecord], None],
    *,
    timeout_s: float = 600.0,
    out_of_range: Callable[[TopicPartition], None] | None = None,
) -> dict[TopicPartition, int]:
    """Give each record from the start positions on to `take`; the end of each partition.

    A start beyond the end, or below what is kept, is told to `out_of_range`, and the partition is
    read from its first kept record instead. Raises Lost past the deadline.
    """
    if not starts:
        return {}
    consumer = bus.reader()
    await start(consumer)
    try:
        return await _read(consumer, starts, take, time.monotonic() + timeout_s, out_of_range)
    finally:
        await stop(consumer)


async def _read(
    consumer: AIOKafkaConsumer,
    starts: Mapping[TopicPartition, int],
    take: Callable[[TopicPartition, ConsumerRecord], None],
    deadline_s: float,
    out_of_range: Callable[[TopicPartition], None] | None,
) -> dict[TopicPartition, int]:
    consumer.assign(list(starts))
    for tp, offset in starts.items():
        consumer.seek(tp, offset)
    pending, ends = set(starts), {}
    while pending:
        if time.monotonic() > deadline_s:
            names = ", ".join(f"{tp.topic}-{tp.partition}" for tp in sorted(pending))
            raise Lost(f"could not read to the end of {names} in time")
        lost: set[TopicPartition] = set()
        try:
            got = await consumer.getmany(*pending, timeout_ms=100)
        except OffsetOutOfRangeError as error:
            # Kafka says which partitions; aiokafka hands them over as the error's argument.
            lost, got = set(error.args[0]) & pending if error.args else set(pending), {}
        for tp, records in got.items():
            for record in records:
                take(tp, record)
        for tp in list(pending - lost):
            if tp not in ends and (high_water := consumer.highwater(tp)) is not None:
                ends[tp] = high_water
            if tp not in ends:
                continue
            position = await consumer.position(tp)
            if position > ends[tp] and starts[tp] == position:
                lost.add(tp)
            elif position >= ends[tp]:
                pending.discard(tp)
        for tp in lost:
            if out_of_range is not None:
                out_of_range(tp)
            first = (await consumer.beginning_offsets([tp]))[tp]
            consumer.seek(tp, first)
            ends.pop(tp, None)
            starts = {**starts, tp: first}
    return ends


async def last_records(
    bus: Bus, topic: str, partitions: int, count: int, *, timeout_s: float = 120.0
) -> dict[int, list[ConsumerRecord]]:
    """About the last `count` records of each partition, at least those. Raises Lost."""
    tps = [TopicPartition(topic, p) for p in range(partitions)]
    consumer = bus.reader()
    await start(consumer)
    try:
        first = await consumer.beginning_offsets(tps)
        ends = await _ends(consumer, first, time.monotonic() + timeout_s)
    finally:
        await stop(consumer)
    found: dict[int, list[ConsumerRecord]] = {tp.partition: [] for tp in tps}
    starts = {tp: max(first[tp], ends[tp] - count) for tp in tps}
    await read_to_end(
        bus, starts, lambda tp, record: found[tp.partition].append(record), timeout_s=timeout_s
    )
    return found


async def _ends(
    consumer: AIOKafkaConsumer, starts: Mapping[TopicPartition, int], deadline_s: float
) -> dict[TopicPartition, int]:
    """The high water of each partition, from the first answer to a fetch."""
    consumer.assign(list(starts))
    for tp, offset in starts.items():
        consumer.seek(tp, offset)
    ends: dict[TopicPartition, int] = {}
    while len(ends) < len(starts):
        if time.monotonic() > deadline_s:
            raise Lost(f"no end of {len(starts) - len(ends)} partitions in time")
        await consumer.getmany(timeout_ms=100)
        for tp in starts:
            if (high_water := consumer.highwater(tp)) is not None:
                ends[tp] = high_water
    return ends
