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
                    original = work.originals[at]
                    record = await self._record(work.partition, original.offset)
                    original.value = record.value or b""
                    work.given[at] = _rollout(record) or work.given[at]
        except OffsetOutOfRangeError as error:
            # The next attempt finds the group lost and says so (`retention`).
            raise Lost(f"{self._topic} no longer holds {error.args[0]}") from error
        except (KafkaError, TimeoutError) as error:
            raise Lost(f"could not read {self._topic}: {error or type(error).__name__}") from error

    async def _record(self, partition: int, offset: int) -> ConsumerRecord:
        tp = TopicPartition(self._topic, partition)
        if self._consumer is None:
            self._consumer = self._bus.reader()
            await start(self._consumer)
        self._consumer.assign([tp])
        self._consumer.seek(tp, offset)
        while True:
            got = await self._consumer.getmany(tp, timeout_ms=POLL_MS, max_records=1)
            for record in got.get(tp, []):
                return record

    async def close(self) -> None:
        if self._consumer is not None:
            await stop(self._consumer)


def _rollout(record: ConsumerRecord) -> Rollout | None:
    """The rollout whole; None where it never could be read, so that its slot stays an error."""
    try:
        found = decode(record.value, list(record.headers))
    except Undecodable:
        return None
    return found if isinstance(found, Rollout) else None
