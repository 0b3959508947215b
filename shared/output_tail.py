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
