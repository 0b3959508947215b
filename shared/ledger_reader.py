"""The ledger as the topic has it now: `ledger.py` holds what it means."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Self

from aiokafka import ConsumerRecord

from rollstream.shared.bus import Bus
from rollstream.shared.codec import Undecodable, decode
from rollstream.shared.ledger import Ledger
from rollstream.shared.log_reader import LogReader
from rollstream.shared.records import Ended, Issued, Redriven
from rollstream.shared.routes import leaves
from rollstream.shared.runs import RunConfig
from rollstream.shared.topics import data_topic


class LedgerReader:
    """A run's books, kept up to date; use it as an async context manager.

    `catch_up` once, then `follow` as often as news are wanted.
    """

    def __init__(self, bus: Bus, run: RunConfig) -> None:
        self.books = Ledger(leaves(run.stages), run.partitions)
        self._log = _log(bus, run)

    async def __aenter__(self) -> Self:
        await self._log.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._log.__aexit__()

    async def catch_up(self, timeout_s: float) -> Ledger:
        """The books with everything that was acknowledged before the call. Raises Lost."""
        async for records in self._log.to_end(timeout_s):
            self._apply(records)
        return self.books

    async def follow(self, timeout_s: float) -> bool:
        """Wait for news up to `timeout_s`; whether there were any. Raises Lost."""
        records = await self._log.more(timeout_s)
        self._apply(records)
        return bool(records)

    def _apply(self, records: list[ConsumerRecord]) -> None:
        for raw in records:
            try:
                record = decode(raw.value, list(raw.headers))
            except Undecodable:
                self.books.strangers += 1
                continue
            if isinstance(record, Issued | Ended | Redriven):
                self.books.apply(raw.partition, record, raw.timestamp / 1000)


def _log(bus: Bus, run: RunConfig) -> LogReader:
    topic = data_topic(run.prefix, run.run, run.pipeline, "ledger")
    return LogReader(bus, topic, range(run.partitions))


async def ledger_records(
    bus: Bus, run: RunConfig, timeout_s: float
) -> AsyncIterator[Issued | Ended | Redriven]:
    """What the ledger holds now, record by record: for what the books keep no memory of.

    Each partition's records come in their order. Raises Lost.
    """
    async with _log(bus, run) as log:
        async for records in log.to_end(timeout_s):
            for raw in records:
                try:
                    record = decode(raw.value, list(raw.headers))
                except Undecodable:
                    continue
                if isinstance(record, Issued | Ended | Redriven):
                    yield record


async def read_ledger(bus: Bus, run: RunConfig, timeout_s: float) -> Ledger:
    """The run's books as they stand now. Raises Lost where they can't be read in time."""
    async with LedgerReader(bus, run) as reader:
        return await reader.catch_up(timeout_s)
