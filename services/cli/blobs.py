"""rollstream blobs RUN: the objects that a run's big records refer to, and those that none does.

A process killed between an object and its record leaves an orphan: harmless, and removed with the
run. `--remove-orphans` removes it earlier; what is younger than an hour may still get its record.
"""

from __future__ import annotations

import re
import sys

from aiokafka.errors import KafkaError

from rollstream.shared.blobs import Blobs, StoreUnreachable
from rollstream.shared.bus import Bus, Lost
from rollstream.shared.codec import Undecodable, decode
from rollstream.shared.config import ConfigError, Parser, parse_flags
from rollstream.shared.log_reader import LogReader
from rollstream.shared.records import DeadLetter, Group, Prompt, Rollout
from rollstream.shared.runs import RunConfig
from rollstream.shared.topics import data_topic

from .connect import Reach, add_reach_flags, find_brokers, load_reach, open_bus, run_async
from .propose import find_run

READ_S = 600.0
YOUNG_H = 1.0
NAME = re.compile(rb"(?:file|s3|gs)://[^\x00-\x20\"\\]+?-[0-9a-f]{16}\.(?:json|msgpack)")


def main(command: str, argv: list[str]) -> int:
    """List them; 0 all are referred to, 1 there are orphans, 2 can't tell."""
    parser = Parser(prog="rollstream blobs", description=__doc__)
    parser.add_argument("RUN")
    parser.add_argument("--remove-orphans", action="store_true", help="remove what no record names")
    parser.add_argument(
        "--older-than-h", type=float, default=YOUNG_H, help="orphans of so many hours (1) or more"
    )
    add_reach_flags(parser)

    async def work(name: str, reach: Reach, older_s: float, *, remove: bool) -> int:
        bus = await open_bus(find_brokers(reach.brokers), reach.security)
        config, _ = await find_run(bus, reach.prefix, name)
        blobs = Blobs(config)
        objects = await blobs.objects()
        named = await _named(bus, config)
        orphans = [one for one in objects if one.uri not in named and one.age_s >= older_s]
        size_mib = sum(one.size_bytes for one in objects) / 2**20
        print(f"{name}: {len(objects)} objects, {size_mib:.1f} MiB, {len(orphans)} orphans")
        if remove:
            # Not what was written again meanwhile: its record is on its way.
            still = {one.uri for one in await blobs.objects() if one.age_s >= older_s}
            gone = [one.uri for one in orphans if one.uri in still]
            await blobs.remove(gone)
            print(f"removed {len(gone)} orphans")
            return 0
        for one in orphans:
            print(f"  {one.uri} ({one.size_bytes} bytes, {one.age_s / 3600:.1f} h old)")
        return 1 if orphans else 0

    try:
        given = parse_flags(parser, argv)
        reach, hours = load_reach(given), given["older_than_h"]
        if not hours >= YOUNG_H:
            fix = "give 1 or more: a younger object may still get its record"
            raise ConfigError("--older-than-h", hours, fix)
        return run_async(
            lambda: work(given["RUN"], reach, hours * 3600, remove=given["remove_orphans"])
        )
    except (ConfigError, Lost, KafkaError, StoreUnreachable, TimeoutError) as error:
        print(f"rollstream blobs: {error}", file=sys.stderr)
        return 2


async def _named(bus: Bus, config: RunConfig) -> set[str]:
    """Every object that a record of the run's topics refers to, dead letters' inputs too."""
    found: set[str] = set()
    kinds = [*(route.output for route in config.stages if route.output), "dlq"]
    for kind in kinds:
        topic = data_topic(config.prefix, config.run, config.pipeline, kind)
        async with LogReader(bus, topic, range(config.partitions)) as log:
            await log.rewind()
            async for records in log.to_end(READ_S):
                for record in records:
                    found |= _refs(record.value, list(record.headers))
    return found


def _refs(body: bytes | None, headers: list[tuple[str, bytes]]) -> set[str]:
    try:
        record = decode(body, headers)
    except Undecodable:
        # It may be a newer version's: whatever reads like an object's name in it counts.
        return {name.decode(errors="replace") for name in NAME.findall(body or b"")}
    if isinstance(record, DeadLetter):
        return set().union(*(_refs(one.value, list(one.headers)) for one in record.inputs))
    if isinstance(record, Prompt | Rollout | Group) and record.bodies is not None:
        return {record.bodies.uri}
    return set()


async def remove_all(config: RunConfig) -> int:
    """Remove every object of a run that is removed; how many. Raises StoreUnreachable."""
    blobs = Blobs(config)
    uris = [one.uri for one in await blobs.objects()]
    await blobs.remove(uris)
    return len(uris)
