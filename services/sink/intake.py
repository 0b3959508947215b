"""From a record of the input topic to a decision; what can't be read is told and bounded."""

from __future__ import annotations

import structlog
from aiokafka import ConsumerRecord

from rollstream.services.sink.decide import Decider, Decision
from rollstream.shared.blobs import BlobCorrupt, BlobMissing, Blobs, StoreUnreachable
from rollstream.shared.bus import Lost
from rollstream.shared.codec import Undecodable, decode, header_int
from rollstream.shared.records import Group, Kind
from rollstream.shared.runs import RunConfig
from rollstream.shared.service import Progress

MAX_UNDECODABLE_IN_A_ROW = 3

log = structlog.get_logger("rollstream.sink")


class Intake:
    """Reads group records for the deciders of all partitions of one leaf.

    `keep_dropped`: whether the leaf has any use for what a dropped group held.
    """

    def __init__(
        self, run: RunConfig, topic: str, progress: Progress, *, keep_dropped: bool = False
    ) -> None:
        self._topic = topic
        self._keep_dropped = keep_dropped
        self._progress = progress
        self._blobs = Blobs(run)
        self._undecodable_in_a_row = 0

    async def decide(self, decider: Decider, record: ConsumerRecord) -> Decision | None:
        """The decision that a record brings, None where it brings none.

        A scored group whose bodies are gone from the object store is dropped, loudly; one that was
        dropped or parked before is that without them. Raises Lost where the store can't be asked,
        and after too many unreadable records in a row: a bad deploy must not drop a topic.
        """
        headers = list(record.headers)
        n = header_int(headers, "rs-group")
        if n is not None and decider.ended(n):
            return None  # not worth decoding
        try:
            group = decode(record.value, headers)
        except Undecodable as error:
            self._undecodable_in_a_row += 1
            self._progress.failed += 1
            log.error("undecodable group record", topic=self._topic, error=str(error),
                      partition=record.partition, offset=record.offset)
            if self._undecodable_in_a_row > MAX_UNDECODABLE_IN_A_ROW:
                raise Lost(f"{self._topic}[{record.partition}]: {self._undecodable_in_a_row} "
                           f"records in a row can't be read ({error})") from error
            return decider.decide_undecodable(headers)
        self._undecodable_in_a_row = 0
        if not isinstance(group, Group):
            return None
        if group.kind is Kind.SCORED or (group.kind is Kind.DROPPED and self._keep_dropped):
            try:
                await self._blobs.fill(group)
            except StoreUnreachable as error:
                raise Lost(str(error)) from error
            except (BlobMissing, BlobCorrupt) as error:
                log.error("a group's bodies are gone", n=group.n, error=str(error))
                if group.kind is Kind.SCORED:
                    reason = "blob_missing" if isinstance(error, BlobMissing) else "blob_corrupt"
                    return decider.decide_lost(group.n, reason)
        return decider.decide(group)
