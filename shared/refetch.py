"""Brings back records that a stage has read and not kept: assembly over its budget (rule 14)."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from rollstream.shared.bus import Bus, Lost, start, stop
from rollstream.shared.codec import Undecodable, decode
from rollstream.shared.intake import Work
from rollstream.shared.records import Rollout

FETCH_S = 60.0
POLL_MS = 200


class Refetch:
    """Reads single records of one topic by their offsets; its client is made at the first need."""

    def __init__(self, bus: Bus, topic: str) -> None:
        self._bus = bus
        self._topic = topic
        self._consumer: AIOKafkaConsumer | None = None
        self._one_at_a_time = asyncio.Lock()

    async def fill(self, work: Work) -> None:
        """Put what was left in the log back into a group's work, in place. Raises Lost."""
        left = work.left_in_log
        if not left:
            return
        try:
            async with asyncio.timeout(FETCH_S), self._one_at_a_time:
                for at in left:
                    left_out = work.inputs[at]
                    record = await self._record(work.partition, left_out.offset)
                    left_out.value = record.value or b""
                    work.given[at] = _rollout(record) or work.given[at]
        except OffsetOutOfRangeError as error:
            # The next attempt finds the group lost and says so (`retention`).
            raise Lost(f"{self._topic} no longer holds {error.args[0]}") from error
        except (KafkaError, TimeoutError) as error:
            raise Lost.because(f"could not read {self._topic}", error) from error

    async def _record(self, partition: int, offset: int) -> ConsumerRecord:
        if self._consumer is None:
            self._consumer = self._bus.reader()
            await start(self._consumer)
        return await record_at(self._consumer, TopicPartition(self._topic, partition), offset)

    async def close(self) -> None:
        if self._consumer is not None:
            await stop(self._consumer)


async def record_at(consumer: AIOKafkaConsumer, tp: TopicPartition, offset: int) -> ConsumerRecord:
    """One record. Raises OffsetOutOfRangeError where it is gone, TimeoutError and KafkaErrors."""
    consumer.assign([tp])
    consumer.seek(tp, offset)
    async with asyncio.timeout(FETCH_S):
        while True:
            got = await consumer.getmany(tp, timeout_ms=POLL_MS, max_records=1)
            for record in got.get(tp, []):
                if record.offset != offset:
                    raise OffsetOutOfRangeError({tp: offset})
                return record


def _rollout(record: ConsumerRecord) -> Rollout | None:
    """The rollout whole; None where it never could be read, so that its slot stays an error."""
    try:
        found = decode(record.value, list(record.headers))
    except Undecodable:
        return None
    return found if isinstance(found, Rollout) else None
