"""rollstream ledger RUN: a run's books, per leaf; exit code 1 where they do not balance."""

from __future__ import annotations

import sys

from aiokafka.errors import KafkaError

from rollstream.shared.bus import Bus, Lost
from rollstream.shared.config import ConfigError, Parser, parse_flags
from rollstream.shared.ledger import LeafBooks
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.runs import RunConfig

from .connect import Reach, add_reach_flags, find_brokers, load_reach, open_bus, run_async
from .propose import known_runs

READ_S = 300.0


def main(command: str, argv: list[str]) -> int:
    """Print the books of a run; 0 balanced, 1 not, 2 can't tell."""
    parser = Parser(prog="rollstream ledger", description=__doc__)
    parser.add_argument("RUN")
    add_reach_flags(parser)

    async def work(name: str, reach: Reach) -> int:
        bus = await open_bus(find_brokers(reach.brokers), reach.security)
        found = (await known_runs(bus, reach.prefix)).runs.get(name)
        if found is None or found.config is None:
            raise ConfigError("RUN", name, "no such run; see `rollstream runs list`")
        books = (await read_ledger(bus, found.config, READ_S)).books()
        print("\n".join(line(leaf) for leaf in books))
        return 0 if all(leaf.balanced for leaf in books) else 1

    try:
        given = parse_flags(parser, argv)
        reach = load_reach(given)
        return run_async(lambda: work(given["RUN"], reach))
    except (ConfigError, Lost, KafkaError) as error:
        print(f"rollstream ledger: {error}", file=sys.stderr)
        return 2


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
