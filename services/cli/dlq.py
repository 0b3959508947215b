"""rollstream dlq list|show|redrive RUN: a run's dead letters, and the way back for parked groups.

    rollstream dlq list my-run
    rollstream dlq show my-run 17
    rollstream dlq redrive my-run --stage scorer --error ZeroDivisionError --dry-run
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from datetime import datetime
from typing import Any

import msgspec
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from rollstream.shared.blobs import BlobCorrupt, BlobMissing, Blobs, StoreUnreachable
from rollstream.shared.bus import Bus, Lost, TooLarge, Writer, start, stop
from rollstream.shared.codec import Undecodable, decode
from rollstream.shared.config import ConfigError, Parser, parse_flags
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.log_reader import LogReader
from rollstream.shared.records import DeadLetter, Input, Redriven, Rollout
from rollstream.shared.redrive import (
    TO,
    Filter,
    Letter,
    NotRedrivable,
    State,
    group_record,
    records_in,
    states,
)
from rollstream.shared.refetch import record_at
from rollstream.shared.routes import leaves_after
from rollstream.shared.runs import Run, RunConfig, Status
from rollstream.shared.topics import data_topic

from .connect import Reach, add_reach_flags, find_brokers, load_reach, open_bus, run_async
from .propose import known_runs, set_status

READ_S = 300.0
DETAIL_CHARACTERS = 70
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def main(command: str, argv: list[str]) -> int:
    """Do it; 0 done, 1 some could not be put back, 2 not possible."""
    parser = Parser(
        prog="rollstream dlq", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["list", "show", "redrive"])
    parser.add_argument("RUN")
    parser.add_argument("N", nargs="?", help="show: the group's number")
    parser.add_argument("--stage", help="only what this stage instance parked")
    parser.add_argument("--error", help="only this type of error")
    parser.add_argument("--groups", help="only these: N or FIRST-LAST")
    parser.add_argument("--since", help="parked at or after: 2h (ago) or 2026-01-31T12:00")
    parser.add_argument("--until", help="parked at or before")
    parser.add_argument("--rate", help="redrive: groups a second [no limit]")
    parser.add_argument("--dry-run", action="store_true", help="redrive: only say what it would do")
    add_reach_flags(parser)
    try:
        given = parse_flags(parser, argv)
        reach, wanted = load_reach(given), _filter(given)
        rate = _number("--rate", given["rate"])
        return run_async(lambda: _work(given, reach, wanted, rate))
    except (ConfigError, Lost, KafkaError, StoreUnreachable, TimeoutError) as error:
        print(f"rollstream dlq: {error}", file=sys.stderr)
        return 2


async def _work(
    given: dict[str, Any], reach: Reach, wanted: Filter, rate: float | None
) -> int:
    bus = await open_bus(find_brokers(reach.brokers), reach.security)
    runs = (await known_runs(bus, reach.prefix)).runs
    run = runs.get(given["RUN"])
    if run is None or run.config is None:
        raise ConfigError("RUN", given["RUN"], "no such run; see `rollstream runs list`")
    letters = await _letters(bus, run.config)
    books = await read_ledger(bus, run.config, READ_S)
    found = [
        (letter, state) for letter, state in states(letters, books, run.config.stages)
        if wanted.takes(letter.letter)
    ]
    match given["action"]:
        case "list":
            print("\n".join(map(_line, found)) or "no dead letters")
            return 0
        case "show":
            return await _show(bus, run.config, found, _number("N", given["N"]))
        case _:
            parked = [letter for letter, state in found if state is State.PARKED]
            return await _redrive(bus, run, parked, rate, dry_run=given["dry_run"])


# -- reading ---------------------------------------------------------------------------------------


async def _letters(bus: Bus, config: RunConfig) -> list[Letter]:
    """All letters of a run by time, without their inputs' bytes: a topic may hold gigabytes."""
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


class _Inputs:
    """Reads a letter's inputs whole; an async context manager."""

    def __init__(self, bus: Bus, config: RunConfig) -> None:
        self._topic = data_topic(config.prefix, config.run, config.pipeline, "dlq")
        self._consumer = bus.reader()

    async def __aenter__(self) -> _Inputs:
        await start(self._consumer)
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop(self._consumer)

    async def of(self, found: Letter) -> list[Input]:
        """From the letter, or from the topic they came from where it could not hold them.

        Raises NotRedrivable where they are gone from there.
        """
        lies = TopicPartition(self._topic, found.partition)
        record = await record_at(self._consumer, lies, found.offset)
        letter = decode(record.value, list(record.headers))
        assert isinstance(letter, DeadLetter)
        for one in letter.inputs:
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
        return letter.inputs


# -- list, show ------------------------------------------------------------------------------------


def _line(found: tuple[Letter, State]) -> str:
    (_, _, letter), state = found
    at = datetime.fromtimestamp(letter.at_ms / 1000).strftime("%Y-%m-%d %H:%M:%S")
    name = f"group {letter.n}" if letter.n >= 0 else f"{letter.topic} at {letter.offset}"
    again = f" (redriven {letter.redrives}x before)" if letter.redrives else ""
    message = " ".join(letter.error.message.split())[:DETAIL_CHARACTERS]
    return f"{at}  {name:<12} {letter.stage:<18} {state:<10} {letter.error.type}: {message}{again}"


async def _show(
    bus: Bus, config: RunConfig, found: list[tuple[Letter, State]], n: float | None
) -> int:
    chosen = [(letter, state) for letter, state in found if n is None or letter.letter.n == n]
    if not chosen:
        raise ConfigError("N", n, "no such dead letter; see `rollstream dlq list`")
    async with _Inputs(bus, config) as inputs:
        for letter, state in chosen:
            told = letter.letter
            print(_line((letter, state)))
            print(f"  {told.error.type}: {told.error.message}")
            print(f"  from {told.topic}[{told.partition}] at {told.offset}, "
                  f"{told.attempts} attempts")
            try:
                whole = await inputs.of(letter)
            except NotRedrivable as error:
                print(f"  {error}")
                continue
            for one in whole:
                headers = ", ".join(
                    f"{key}={value.decode(errors='replace')}" for key, value in one.headers
                )
                print(f"  -- offset {one.offset}, key {(one.key or b'').decode(errors='replace')}, "
                      f"{headers}")
                print("  " + _text(one))
    return 0


def _text(one: Input) -> str:
    try:
        record = decode(one.value, list(one.headers))
    except Undecodable as error:
        return f"can't be read ({error}): {(one.value or b'')[:2000]!r}"
    if isinstance(record, Rollout):
        said = [str(message.get("content")) for message in record.completion]
        return f"sample {record.i}: {record.row.question!r} -> {said} [{record.stop}]"
    return msgspec.json.encode(record).decode()


# -- redrive ---------------------------------------------------------------------------------------


async def _redrive(
    bus: Bus, run: Run, parked: list[Letter], rate: float | None, *, dry_run: bool
) -> int:
    config = run.config
    assert config is not None
    if dry_run:
        print("\n".join(_line((letter, State.PARKED)) for letter in parked))
        print(f"would put back {len(parked)} groups")
        return 0
    refused = 0
    writer = await bus.writer()
    try:
        async with _Inputs(bus, config) as inputs:
            for letter in parked:
                started_s = time.monotonic()
                try:
                    await _put_back(writer, config, letter, await inputs.of(letter))
                except (NotRedrivable, TooLarge) as error:
                    refused += 1
                    print(f"group {letter.letter.n}: {error}", file=sys.stderr)
                if rate:
                    await asyncio.sleep(max(0.0, 1 / rate - (time.monotonic() - started_s)))
    finally:
        await writer.close()
    await _open_again(bus, run)
    print(f"put back {len(parked) - refused} groups" + (f", {refused} not" if refused else ""))
    return 1 if refused else 0


async def _put_back(
    writer: Writer, config: RunConfig, found: Letter, inputs: list[Input]
) -> None:
    letter, blobs = found.letter, Blobs(config)
    records = records_in(inputs)
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


async def _open_again(bus: Bus, run: Run) -> None:
    """A run that is over is attended again until what was put back has ended.

    One that was stopped admits nothing new: it is opened as stopped.
    """
    config, state = run.config, run.state
    if config is None or state is None or state.status not in (Status.FINISHING, Status.DONE):
        return
    books = (await read_ledger(bus, config, READ_S)).books()
    if any(leaf.in_flight for leaf in books):
        was_stopped = state.reason.startswith("stopped")
        status = Status.STOPPED if was_stopped else Status.RUNNING
        reason = "stopped; redriven groups" if was_stopped else "redriven groups"
        await set_status(bus, config.prefix, run.id, status, reason)
        print(f"{run.id}: {status} again until they have ended")


# -- flags -----------------------------------------------------------------------------------------


def _filter(given: dict[str, Any]) -> Filter:
    first, last = _range(given["groups"])
    return Filter(
        given["stage"], given["error"], first, last, _time_ms("--since", given["since"]),
        _time_ms("--until", given["until"]),
    )


def _range(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise ConfigError("--groups", text, "give N or FIRST-LAST, e.g. 17 or 10-20")
    return int(first), int(last or first)


def _time_ms(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    if (ago := _AGO.fullmatch(text)) is not None:
        return int((time.time() - float(ago[1]) * _UNIT_S[ago[2]]) * 1000)
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError as error:
        raise ConfigError(flag, text, "give e.g. 30m, 2h, 3d or 2026-01-31T12:00") from error


def _number(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf") or (flag == "--rate" and number == 0):
        raise ConfigError(flag, text, "give a positive number")
    return number
