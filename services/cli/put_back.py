"""Puts parked groups back: the record, the ledger, then the run's state where it was over.

Why in this order, and what a kill in between leaves: `shared/redrive.py`.
"""

from __future__ import annotations

import asyncio
import sys
import time

from rollstream.shared.blobs import BlobCorrupt, BlobMissing, Blobs
from rollstream.shared.bus import Bus, TooLarge, Writer
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.records import Input, Redriven
from rollstream.shared.redrive import (
    TO,
    Letter,
    NotRedrivable,
    group_record,
    opened_again,
    records_in,
)
from rollstream.shared.registry import set_status
from rollstream.shared.routes import leaves_after
from rollstream.shared.runs import RunConfig, Status
from rollstream.shared.topics import data_topic

from .letters import READ_S, Inputs
from .propose import known_runs

OPEN_EVERY_S = 5.0
"""A slow redrive (`--rate`) opens the run as it goes: what is put back waits for no others."""


async def put_back(
    bus: Bus, config: RunConfig, parked: list[Letter], rate: float | None
) -> int:
    """Put these groups back, at most `rate` a second; how many could not be.

    What could not is told on stderr. Raises Lost, KafkaError and StoreUnreachable.
    """
    refused, opened_s = 0, time.monotonic()
    writer = await bus.writer()
    try:
        async with Inputs(bus, config) as inputs:
            for letter in parked:
                started_s = time.monotonic()
                try:
                    await write_group(writer, config, letter, await inputs.of(letter))
                except (NotRedrivable, TooLarge) as error:
                    refused += 1
                    print(f"group {letter.letter.n}: {error}", file=sys.stderr)
                if time.monotonic() - opened_s > OPEN_EVERY_S:
                    await open_again(bus, config)
                    opened_s = time.monotonic()
                if rate:
                    await asyncio.sleep(max(0.0, 1 / rate - (time.monotonic() - started_s)))
    finally:
        await writer.close()
    await open_again(bus, config)
    return refused


async def write_group(
    writer: Writer, config: RunConfig, found: Letter, inputs: list[Input]
) -> None:
    """One group's record to the instance that parked it, then to the ledger.

    Raises NotRedrivable, TooLarge, Lost and StoreUnreachable.
    """
    letter, blobs = found.letter, Blobs(config)
    records = records_in(inputs, config)
    try:
        for record in records:
            await blobs.fill(record)
    except (BlobMissing, BlobCorrupt) as error:
        raise NotRedrivable(f"{error}: restore it first") from error
    group = group_record(letter, records)
    key = f"{config.run}/{letter.n}"
    await blobs.send(
        writer, letter.topic, letter.partition, group, key=key,
        headers=[(TO, letter.stage.encode())],
    )
    redriven = Redriven(
        n=letter.n, redrives=group.redrives, leaves=leaves_after(config.stages, letter.stage)
    )
    ledger = data_topic(config.prefix, config.run, config.pipeline, "ledger")
    await writer.send(ledger, letter.n % config.partitions, redriven, key=key)


async def open_again(bus: Bus, config: RunConfig) -> None:
    """Have a run that is over attended again, as long as anything of it is in flight.

    Its state is read after the ledger was written: the producer that ends the run meanwhile reads
    the ledger after it has written the state. Raises Lost.
    """
    run = (await known_runs(bus, config.prefix)).runs.get(config.run)
    if run is None or run.state is None or run.status not in (Status.FINISHING, Status.DONE):
        return
    books = (await read_ledger(bus, config, READ_S)).books()
    if any(leaf.in_flight for leaf in books):
        status, reason = opened_again(run.state.reason)
        await set_status(bus, config.prefix, config.run, status, reason)
        print(f"{config.run}: {status} again until they have ended")
