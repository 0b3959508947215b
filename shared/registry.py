"""The runs topic: all runs as it has them now, a run's new state (`runs.py`: what they mean)."""

from __future__ import annotations

import time

import msgspec

from rollstream.shared.bus import Bus
from rollstream.shared.log_reader import LogReader
from rollstream.shared.runs import Registry, RunState, Status, state_key
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


async def set_status(bus: Bus, prefix: str, run: str, status: Status, reason: str) -> None:
    """Write a run's new state. Raises Lost and KafkaError."""
    writer = await bus.writer()
    try:
        state = RunState(status=status, reason=reason, changed_s=time.time())
        await writer.send_bytes(
            runs_topic(prefix), 0, state_key(run), msgspec.json.encode(state)
        )
    finally:
        await writer.close()
