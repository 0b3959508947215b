"""Rows that an earlier run has delivered already, by their content: `--exclude-done RUN`.

A changed dataset is a new run. Its ledger holds a hash of each issued row, so that the new run can
leave out what was paid for before, wherever it stands in the new dataset.
"""

from __future__ import annotations

import hashlib

from rollstream.shared.bus import Bus
from rollstream.shared.environments.rows import canonical_json
from rollstream.shared.ledger_reader import ledger_records
from rollstream.shared.records import Ended, Issued, Outcome, Row
from rollstream.shared.registry import read_registry
from rollstream.shared.runs import Refusal, RunConfig, Status

READ_S = 120.0


def row_hash(row: Row) -> str:
    """A row's content: prompt and answer, not where it stands; 16 hex digits of a sha256."""
    content = canonical_json((row.prompt, row.answer, row.task))
    return hashlib.sha256(content).hexdigest()[:16]


async def delivered_rows(bus: Bus, run: RunConfig) -> set[str]:
    """The hashes of the rows that `run.exclude_done` has delivered at any leaf.

    Raises Refusal where there is no such run, or it goes on: then the rows would change under us.
    """
    runs = (await read_registry(bus, run.prefix)).runs
    earlier = runs.get(run.exclude_done)
    if earlier is None or earlier.config is None:
        known = ", ".join(sorted(runs)) or "none"
        raise Refusal("exclude_done", run.exclude_done, f"no such run (there are: {known})")
    if earlier.status is not Status.DONE:
        raise Refusal(
            "exclude_done", run.exclude_done, f"it is {earlier.status}: wait until it is done"
        )
    return await _delivered(bus, earlier.config)


async def _delivered(bus: Bus, run: RunConfig) -> set[str]:
    rows: dict[int, str] = {}
    delivered: set[int] = set()
    async for record in ledger_records(bus, run, READ_S):
        if isinstance(record, Issued) and record.row_hash:
            rows[record.n] = record.row_hash
        elif isinstance(record, Ended) and record.outcome is Outcome.DELIVERED:
            delivered.add(record.n)
    return {rows[n] for n in delivered if n in rows}
