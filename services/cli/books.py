"""rollstream ledger RUN: a run's books per leaf, where everything in flight is, and what is stuck.

    sft-1/dataset: issued 60 = delivered 41 + dropped 0 + parked 0 + in flight 19  [balanced]

Exit code 1 where the books do not balance or a sample is found nowhere.
"""

from __future__ import annotations

import argparse
import sys

import msgspec
from aiokafka.errors import KafkaError

from rollstream.shared.bus import Bus, Lost
from rollstream.shared.config import ConfigError, Parser, parse_flags
from rollstream.shared.ledger import LeafBooks
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.runs import RunConfig, RunState, Status
from rollstream.shared.whereabouts import Place, State, table

from .audit import Audit, audit, stuck
from .connect import Reach, add_reach_flags, find_brokers, load_reach, open_bus, run_async
from .propose import find_run

READ_S = 300.0
COLUMNS = (State.ISSUED, State.QUEUED, State.RUNNING, State.WAITING, State.OPEN, State.BUFFERED)
MOST_LINES = 50


def main(command: str, argv: list[str]) -> int:
    """Print it; 0 all is well, 1 not, 2 can't tell."""
    parser = Parser(
        prog="rollstream ledger", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("RUN")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    add_reach_flags(parser)

    async def work(name: str, reach: Reach, *, as_json: bool) -> int:
        bus = await open_bus(find_brokers(reach.brokers), reach.security)
        config, state = await find_run(bus, reach.prefix, name)
        seen = await audit(bus, config)
        if as_json:
            print(_json(config, state, seen))
        else:
            print("\n".join([*_status(config, state), *report(config, seen)]))
        return 0 if _well(seen) else 1

    try:
        given = parse_flags(parser, argv)
        reach = load_reach(given)
        return run_async(lambda: work(given["RUN"], reach, as_json=given["json"]))
    except (ConfigError, Lost, KafkaError, TimeoutError) as error:
        print(f"rollstream ledger: {error}", file=sys.stderr)
        return 2


def _well(seen: Audit) -> bool:
    lost = any(p.state is State.NOWHERE for places in seen.places.values() for p in places)
    return not lost and all(leaf.balanced for leaf in seen.books)


def _status(run: RunConfig, state: RunState | None) -> list[str]:
    """Why nothing moves, where it is the run's own state."""
    if state is None or state.status is Status.RUNNING:
        return []
    return [f"{run.run} is {state.status}" + (f": {state.reason}" if state.reason else "")]


def report(run: RunConfig, seen: Audit) -> list[str]:
    """Books, a table a leaf, then what is stuck, then alarms."""
    told: list[str] = []
    for leaf in seen.books:
        told.append(line(leaf))
        places = seen.places[leaf.leaf]
        if not places:
            continue
        told.append(f"  {'samples at':<20}" + "".join(f"{state:>9}" for state in COLUMNS)
                    + f"{'oldest':>9}")
        for row in table(places, seen.stages[leaf.leaf], seen.at_s):
            counts = "".join(f"{row.counts[state] or '.':>9}" for state in COLUMNS)
            oldest = f"{row.oldest_s:>7.0f} s" if any(row.counts.values()) else f"{'.':>9}"
            told.append(f"  {row.stage:<20}{counts}{oldest}{_attended(seen, row.stage)}")
        late = [
            f"  stuck: sample {p.n}/{p.i} is {p.state} at {p.stage} for {seen.at_s - p.since_s:.0f}"
            f" s, longer than {limit:.0f} s{_attended(seen, p.stage)}"
            for p, limit in stuck(run, seen, leaf.leaf)
        ]
        told += _cut(late)
        told += _cut([_alarm(place) for place in places if place.state is State.NOWHERE])
    return told


def _attended(seen: Audit, stage: str) -> str:
    return "  (no process attends it)" if seen.members.get(stage) == 0 else ""


def _alarm(place: Place) -> str:
    return f"  ALARM: sample {place.n}/{place.i} is found nowhere: {place.why}"


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], f"  ... and {more} more"] if more > 0 else lines


def _json(run: RunConfig, state: RunState | None, seen: Audit) -> str:
    leaves = {
        books.leaf: {
            **books._asdict(), "balanced": books.balanced,
            "places": [place._asdict() for place in seen.places[books.leaf]],
            "stuck": [place._asdict() for place, _ in stuck(run, seen, books.leaf)],
        }
        for books in seen.books
    }
    return msgspec.json.encode({
        "run": run.run, "status": state and state.status, "leaves": leaves, "members": seen.members,
    }).decode()


def line(books: LeafBooks) -> str:
    """One leaf's books as the identity that they are."""
    dropped = sum(books.dropped.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(books.dropped.items()))
    mean = ""
    if books.reward_count:
        mean = f"  mean reward {books.reward_sum / books.reward_count:.3f}"
    mark = "balanced" if books.balanced else "DOES NOT BALANCE"
    return (
        f"{books.leaf}: issued {books.issued} = delivered {books.delivered} + dropped {dropped}"
        + (f" ({reasons})" if reasons else "")
        + f" + parked {books.parked} + in flight {books.in_flight}  [{mark}]{mean}"
    )


async def summary(bus: Bus, config: RunConfig) -> str:
    """What to say of a run that has ended."""
    books = (await read_ledger(bus, config, READ_S)).books()
    lines = [f"{config.run}: " + line(leaf) for leaf in books]
    return "\n".join([*lines, f"  results: {config.sink.out}"])
