"""Reads partitions of one topic without a group: up to their present end, and on from there.

The end is the high water mark that a fetch reports, never `end_offsets()`: on the embedded broker
the latter is wrong after a batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Self

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError, OffsetOutOfRangeError

from rollstream.shared.bus import Bus, Lost, start, stop

POLL_MS = 100


class Gone(Lost):
    """Positions that the log does not reach: deleted before they were read, or another log."""

    def __init__(self, topic: str, partitions: dict[int, int]) -> None:
        told = ", ".join(f"[{p}] at {offset}" for p, offset in sorted(partitions.items()))
        super().__init__(f"{topic}: the log does not hold {told}")
        self.partitions = partitions


async def has_read_all(consumer: AIOKafkaConsumer, tp: TopicPartition) -> bool:
    """Whether a group's member stands at the end of its log. Raises Gone where that lies before it.

    By the consumer's own position: it also passes what is no record, e.g. transaction markers.
    """
    if tp not in consumer.assignment():
        return False
    high_water = consumer.highwater(tp)
    try:
        position = await consumer.position(tp)
    except IllegalStateError:
        return False
    if high_water is not None and position > high_water:
        # The embedded broker says nothing about a position beyond its log's end.
        raise Gone(tp.topic, {tp.partition: position})
    return position == high_water


class LogReader:
    """A reader of some partitions of a topic; use it as an async context manager.

    `position` maps each partition to the offset that is read next.
    """

    def __init__(self, bus: Bus, topic: str, partitions: Iterable[int]) -> None:
        self._consumer = bus.reader()
        self.topic = topic
        self.position: dict[int, int] = dict.fromkeys(partitions, 0)

    async def __aenter__(self) -> Self:
        try:
            await start(self._consumer)
        except (KafkaError, TimeoutError) as error:
            raise Lost.because(f"could not read {self.topic}", error) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop(self._consumer)

    async def rewind(self) -> None:
        """Go to the first record that each partition still keeps. Raises Lost."""
        self.position = await self.first(self.position)

    async def since(self, at_s: float) -> None:
        """Go to the first record of at least this time, to the end where there is none.

        The embedded broker, which forgets nothing, knows no times: all is read. Raises Lost.
        """
        tps = [TopicPartition(self.topic, p) for p in self.position]
        asked = dict.fromkeys(tps, max(0, int(at_s * 1000)))
        try:
            async with asyncio.timeout(30):
                # The end first: what comes between the two questions must not be passed.
                ends = await self._consumer.end_offsets(tps)
                found = await self._consumer.offsets_for_times(asked)
        except (KafkaError, TimeoutError) as error:
            raise Lost.because(f"could not read {self.topic}", error) from error
        self.position = {
            tp.partition: told.offset if (told := found.get(tp)) else ends[tp] for tp in tps
        }

    async def first(self, partitions: Iterable[int]) -> dict[int, int]:
        """The offset of the first record that each partition still keeps. Raises Lost."""
        tps = [TopicPartition(self.topic, p) for p in partitions]
        try:
            first = await asyncio.wait_for(self._consumer.beginning_offsets(tps), 30)
        except (KafkaError, TimeoutError) as error:
            raise Lost.because(f"could not read {self.topic}", error) from error
        return {tp.partition: offset for tp, offset in first.items()}

    async def ends(self, timeout_s: float) -> dict[int, int]:
        """The high water of each partition, as a fetch from `position` reports it. Raises Lost."""
        deadline = time.monotonic() + timeout_s
        position = dict(self.position)
        tps = self._assign()
        ends: dict[int, int] = {}
        while len(ends) < len(tps):
            if time.monotonic() > deadline:
                raise Lost(f"{self.topic}: its end was not told within {timeout_s:g} s")
            await self._get(tps)
            for tp in tps:
                if (high := self._consumer.highwater(tp)) is not None:
                    ends[tp.partition] = high
        self.position = position
        return ends

    def _assign(self) -> list[TopicPartition]:
        """Start from `position`; only a new assignment forgets an earlier read's high water."""
        tps = [TopicPartition(self.topic, p) for p in self.position]
        self._consumer.assign(tps)
        for tp in tps:
            self._consumer.seek(tp, self.position[tp.partition])
        return tps

    async def to_end(self, timeout_s: float) -> AsyncIterator[list[ConsumerRecord]]:
        """Records from `position` on, until everything is read that was written before the call.

        Raises Lost after `timeout_s`, and where a position is outside of the log.
        """
        deadline = time.monotonic() + timeout_s
        tps = self._assign()
        pending, ends = set(tps), {}
        while pending:
            if time.monotonic() > deadline:
                raise Lost(f"{self.topic} was not read to its end within {timeout_s:g} s")
            if records := await self._get(tps):
                yield records
            for tp in list(pending):
                if tp not in ends and (high := self._consumer.highwater(tp)) is not None:
                    ends[tp] = high
                if tp in ends and self.position[tp.partition] >= ends[tp]:
                    self._check(tp, ends[tp])
                    pending.discard(tp)

    async def more(self, timeout_s: float) -> list[ConsumerRecord]:
        """What has come after `to_end`, waiting up to `timeout_s` for the first.

        Raises Lost where a position is outside of the log.
        """
        tps = [TopicPartition(self.topic, p) for p in self.position]
        return await self._get(tps, int(timeout_s * 1000))

    async def _get(
        self, tps: list[TopicPartition], timeout_ms: int = POLL_MS
    ) -> list[ConsumerRecord]:
        try:
            # aiokafka waits for a fetch of its own even where the broker is gone
            async with asyncio.timeout(timeout_ms / 1000 + 30):
                got = await self._consumer.getmany(*tps, timeout_ms=timeout_ms)
        except OffsetOutOfRangeError as error:
            told = {tp.partition: offset for tp, offset in error.args[0].items()}
            raise Gone(self.topic, told) from error
        except (KafkaError, TimeoutError) as error:
            raise Lost.because(f"could not read {self.topic}", error) from error
        for tp in tps:
            self.position[tp.partition] = await self._consumer.position(tp)
        return [record for records in got.values() for record in records]

    def _check(self, tp: TopicPartition, end: int) -> None:
        """The embedded broker says nothing about a position beyond the end of the log."""
        position = self.position[tp.partition]
        later = self._consumer.highwater(tp) or end
        if position > max(end, later):
            raise Gone(self.topic, {tp.partition: position})
