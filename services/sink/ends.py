"""Ends into the ledger: the sink is the only one that writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rollstream.shared.bus import Writer
from rollstream.shared.metrics import Metrics
from rollstream.shared.records import Ended
from rollstream.shared.service import RunContext

SENDS_AT_ONCE = 500


async def write_ends(context: RunContext, writer: Writer, ends: Iterable[Ended]) -> None:
    """Each end into its group's ledger partition, acknowledged, and counted. Raises Lost."""
    run, topic, pending = context.run, context.topic("ledger"), list(ends)
    for first in range(0, len(pending), SENDS_AT_ONCE):
        # waits: each send has a deadline
        await asyncio.gather(*(
            writer.send(topic, end.n % run.partitions, end, key=f"{run.run}/{end.n}")
            for end in pending[first : first + SENDS_AT_ONCE]
        ))
    metrics = Metrics(run.pipeline, context.route.instance)
    for end in pending:
        metrics.ended(end.outcome, end.reason)
