"""Reads a run's dead letters, their inputs whole, and how their groups ended."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from rollstream.shared.bus import Bus, start, stop
from rollstream.shared.codec import Undecodable, decode
from rollstream.shared.ledger_reader import ledger_records
from rollstream.shared.log_reader import LogReader
from rollstream.shared.records import DeadLetter, Ended, Input, Outcome
from rollstream.shared.redrive import Letter, NotRedrivable
from rollstream.shared.refetch import record_at
from rollstream.shared.runs import RunConfig
from rollstream.shared.topics import data_topic

READ_S = 300.0


async def read_letters(bus: Bus, config: RunConfig) -> list[Letter]:
    """All letters of a run by time, without their inputs' bytes: a topic may hold gigabytes.

    Raises Lost.
    """
    topic = data_topic(config.prefix, config.run, config.pipeline, "dlq")
    found: list[Letter] = []
    async with LogReader(bus, topic, range(config.partitions)) as log:
        await log.rewind()
        async for records in log.to_end(READ_S):
            for record in records:
                try:
                    letter = decode(record.value, list(record.headers))
                except Undecodable:
                    continue
                if isinstance(letter, DeadLetter):
                    letter.inputs = [msgspec.structs.replace(i, value=None) for i in letter.inputs]
                    found.append(Letter(record.partition, record.offset, letter))
    return sorted(found, key=lambda letter: letter.letter.at_ms)


async def read_ends(
    bus: Bus, config: RunConfig, numbers: Collection[int]
) -> dict[int, dict[str, Ended]]:
    """How each of these groups ended at each leaf: what the books keep no memory of. Raises Lost.
    """
    ends: dict[int, dict[str, Ended]] = {n: {} for n in numbers}
    async for said in ledger_records(bus, config, READ_S):
        if isinstance(said, Ended) and said.n in ends and said.outcome != Outcome.PARKED:
            ends[said.n].setdefault(said.leaf, said)
    return ends


class Inputs:
    """Reads a letter's inputs whole; an async context manager."""

    def __init__(self, bus: Bus, config: RunConfig) -> None:
        self._topic = data_topic(config.prefix, config.run, config.pipeline, "dlq")
        self._consumer = bus.reader()

    async def __aenter__(self) -> Inputs:
        await start(self._consumer)
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop(self._consumer)

    async def of(self, found: Letter) -> list[Input]:
        """From the letter, or from the topic they came from where it could not hold them.

        Raises NotRedrivable where they are gone from there.
        """
        letter = found.letter
        lies = TopicPartition(self._topic, found.partition)
        inputs = await self._letter(lies, found.offset)
        for one in inputs:
            if one.value is None:
                came_from = TopicPartition(letter.topic, letter.partition)
                try:
                    source = await record_at(self._consumer, came_from, one.offset)
                except (KafkaError, TimeoutError) as error:
                    raise NotRedrivable(
                        f"its inputs were too large for the dead letters, and {letter.topic} no "
                        f"longer holds offset {one.offset}"
                    ) from error
                one.value = source.value
        return inputs

    async def _letter(self, lies: TopicPartition, offset: int) -> list[Input]:
        try:
            record = await record_at(self._consumer, lies, offset)
            letter = decode(record.value, list(record.headers))
        except (KafkaError, TimeoutError, Undecodable) as error:
            raise NotRedrivable(
                f"its letter is gone from {lies.topic}: {str(error) or type(error).__name__}"
            ) from error
        assert isinstance(letter, DeadLetter)
        return letter.inputs
