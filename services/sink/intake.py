"""From a record of the input topic to a decision; what can't be read is told and bounded."""

from __future__ import annotations

import structlog
from aiokafka import ConsumerRecord

from rollstream.services.sink.decide import Decider, Decision
from rollstream.shared.bus import Lost
from rollstream.shared.codec import Undecodable, decode
from rollstream.shared.records import Group
from rollstream.shared.service import Progress

MAX_UNDECODABLE_IN_A_ROW = 3

log = structlog.get_logger("rollstream.sink")


class Intake:
    """Reads group records for the deciders of all partitions of one leaf."""

    def __init__(self, topic: str, progress: Progress) -> None:
        self._topic = topic
        self._progress = progress
        self._undecodable_in_a_row = 0

    def decide(self, decider: Decider, record: ConsumerRecord) -> Decision | None:
        """The decision that a record brings, None where it brings none.

        Raises Lost after too many unreadable records in a row: a bad deploy must not drop a topic.
        """
        headers = list(record.headers)
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
        return decider.decide(group) if isinstance(group, Group) else None
