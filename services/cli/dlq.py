"""rollstream dlq list|show|redrive RUN: a run's dead letters, and the way back for parked groups.

    rollstream dlq list my-run
    rollstream dlq show my-run 17
    rollstream dlq redrive my-run --stage scorer --error ZeroDivisionError --dry-run
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from datetime import datetime
from typing import Any

import msgspec
from aiokafka.errors import KafkaError

from rollstream.shared.blobs import StoreUnreachable
from rollstream.shared.bus import Bus, Lost
from rollstream.shared.codec import Undecodable, decode
from rollstream.shared.config import ConfigError, Parser, parse_flags
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.records import Input, Rollout
from rollstream.shared.redrive import Filter, Letter, NotRedrivable, State, states
from rollstream.shared.runs import RunConfig

from .connect import Reach, add_reach_flags, find_brokers, load_reach, open_bus, run_async
from .letters import READ_S, Inputs, read_ends, read_letters
from .propose import find_run
from .put_back import put_back

DETAIL_CHARACTERS = 70
NOT_TAKEN = {
    State.EVIDENCE: "undecodable, kept as evidence: their slots are closed, nothing to put back",
    State.IN_FLIGHT: "not parked yet: the sink has not read of it",
}
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
    parser.add_argument("--groups", "--group", help="only these: N or FIRST-LAST")
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
    config, _ = await find_run(bus, reach.prefix, given["RUN"])
    letters = await read_letters(bus, config)
    books = await read_ledger(bus, config, READ_S)
    found = [
        (letter, state) for letter, state in states(letters, books, config.stages)
        if wanted.takes(letter.letter)
    ]
    match given["action"]:
        case "list":
            lines = await _lines(bus, config, found)
            print("\n".join(lines) or "no dead letters")
            return 0
        case "show":
            return await _show(bus, config, found, _number("N", given["N"]))
        case _:
            return await _redrive(bus, config, found, rate, dry_run=given["dry_run"])


# -- list, show ------------------------------------------------------------------------------------


async def _lines(
    bus: Bus, config: RunConfig, found: list[tuple[Letter, State]]
) -> list[str]:
    """A line a letter; of an ended group it says how."""
    numbers = {letter.letter.n for letter, state in found if state is State.ENDED}
    ends = await read_ends(bus, config, numbers) if numbers else {}
    lines = []
    for letter, state in found:
        told = ends.get(letter.letter.n, {}).values() if state is State.ENDED else ()
        how = sorted({f"{end.outcome} {end.reason}".strip() for end in told})
        lines.append(_line(letter, " ".join([state, ", ".join(how)]).strip()))
    return lines


def _line(found: Letter, state: str) -> str:
    letter = found.letter
    at = datetime.fromtimestamp(letter.at_ms / 1000).strftime("%Y-%m-%d %H:%M:%S")
    name = f"group {letter.n}" if letter.n >= 0 else f"{letter.topic} at {letter.offset}"
    again = f" (redriven {letter.redrives}x before)" if letter.redrives else ""
    message = " ".join(letter.error.message.split())[:DETAIL_CHARACTERS]
    return f"{at}  {name:<12} {letter.stage:<18} {state:<10}  {letter.error.type}: {message}{again}"


async def _show(
    bus: Bus, config: RunConfig, found: list[tuple[Letter, State]], n: float | None
) -> int:
    chosen = [(letter, state) for letter, state in found if n is None or letter.letter.n == n]
    if not chosen:
        raise ConfigError("N", n, "no such dead letter; see `rollstream dlq list`")
    async with Inputs(bus, config) as inputs:
        lines = await _lines(bus, config, chosen)
        for (letter, _), line in zip(chosen, lines, strict=True):
            told = letter.letter
            print(line)
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
    bus: Bus, config: RunConfig, found: list[tuple[Letter, State]], rate: float | None, *,
    dry_run: bool,
) -> int:
    parked = [letter for letter, state in found if state is State.PARKED]
    for state, why in NOT_TAKEN.items():
        if count := sum(one is state for _, one in found):
            print(f"left aside: {count} {why}", file=sys.stderr)
    if dry_run:
        for letter in parked:
            print(_line(letter, State.PARKED))
        print(f"would put back {len(parked)} groups")
        return 0
    refused = await put_back(bus, config, parked, rate)
    print(f"put back {len(parked) - refused} groups" + (f", {refused} not" if refused else ""))
    return 1 if refused else 0


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
