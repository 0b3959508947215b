"""The runs as the runs topic has them now: `runs.py` holds what they mean."""

from __future__ import annotations

from rollstream.shared.bus import Bus
from rollstream.shared.log_reader import LogReader
from rollstream.shared.runs import Registry
from rollstream.shared.topics import runs_topic

READ_S = 60.0


async def read_registry(bus: Bus, prefix: str) -> Registry:
    """All runs as the runs topic has them now. Raises Lost."""
    registry = Registry()
    async with LogReader(bus, runs_topic(prefix), [0]) as log:
        async for records in log.to_end(READ_S):
            for record in records:
                registry.apply(record.key, record.value)
    return registry
