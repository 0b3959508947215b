"""What hurts do to a run under steady load, in numbers: one fault after the other, many times each.

    .venv/bin/python bench/chaos.py --minutes 2                    (embedded broker)
    KAFKA_HOME=... .venv/bin/python bench/chaos.py --minutes 2 --broker kafka

Two processes of each service; sft with a teacher, a rubric that answers at random, groups of 4,
scripted answers that take a second, session timeout 6 s. Prints a markdown table, a row per fault:

- lost, doubled, torn: of the run's groups, told by its files, its ledger and its log
  (`tests/reckoning.py`).
- answered again: samples that the inference server answered a second time: what was in flight at
  the process that was hurt.
- finished, again: of those, rollouts that were in the log already. Must be 0 after a kill.
- recovery: the longest time after a fault that a partition delivered nothing; of all these the
  median and the longest. In the first row nothing is hurt.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from reckoning import reckon
from rig import MODEL, Engine, Rig, rig, signalled

from rollstream.shared import brokers
from rollstream.shared.records import Ended, Outcome
from rollstream.shared.runs import RunConfig, Teacher

K = 4
GROUPS_A_MINUTE = 180
MAX_IN_FLIGHT = 32
EVERY_S = (4.0, 10.0)
"""From the start, or from when all partitions deliver again, to the next fault."""
LONGEST_S = 120.0
STOPPED_S = 10.0
ANSWERS = [{"text": f"It is {n}.", "delay_s": 1.0} for n in range(9)]
STAGES = ["generator", "scorer", "teacher-distiller", "sink"]
COLUMNS = ["fault", "times", "groups", "lost", "doubled", "torn", "answered again",
           "finished, again", "recovery, s (median / longest)"]

Hurt = Callable[[Rig, random.Random], Awaitable[None]]


async def nothing(made: Rig, pick: random.Random) -> None:
    """For comparison."""


def kill(name: str) -> Hurt:
    """kill -9 one of the two; it is started again after a second."""

    async def hurt(made: Rig, pick: random.Random) -> None:
        made.hurt(name, pick)

    return hurt


async def stop_and_continue(made: Rig, pick: random.Random) -> None:
    """SIGSTOP past the session of 6 s, then SIGCONT: a zombie."""
    name = pick.choice(STAGES)
    victim = pick.choice([child for child in made.children.running() if child.name == name])
    signalled(victim, signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    signalled(victim, signal.SIGCONT)


async def come_and_go(made: Rig, pick: random.Random) -> None:
    """Two more generators join, and leave by SIGTERM."""
    more = [await made.service("generator") for _ in range(2)]
    await asyncio.sleep(20)
    await asyncio.gather(*(made.leave(child) for child in more))


FAULTS: dict[str, Hurt] = {
    "none": nothing,
    "kill -9 prompt-producer": kill("prompt-producer"),
    **{f"kill -9 {name}": kill(name) for name in STAGES},
    f"SIGSTOP {STOPPED_S:g} s, any stage": stop_and_continue,
    "2 more generators, then SIGTERM": come_and_go,
}


async def measure(
    made: Rig, engine: Engine, name: str, at: int, minutes: float, pick: random.Random
) -> str:
    """One run under one fault; its row of the table. Raises AssertionError, see `reckon`."""
    groups = round(GROUPS_A_MINUTE * minutes)
    answered = engine.finished_requests("stop")
    config = await made.run(
        "sft", f"hurt-{at}", env="judge_env", env_args={"rows": groups}, epochs=1, group_size=K,
        max_in_flight=MAX_IN_FLIGHT,
        teacher=Teacher(endpoint=engine.url, model=MODEL, top_k=1),
    )
    hurt_s: list[float] = []
    while True:
        await asyncio.sleep(pick.uniform(*EVERY_S))
        if (await made.books(config)).ended > groups * 0.9:
            break
        hurt_s.append(time.time())
        await FAULTS[name](made, pick)
        await recovered(made, config, groups, hurt_s[-1])
    await made.done(config, timeout_s=300)
    found = await reckon(made, config, groups=groups)
    again = engine.finished_requests("stop") - answered - groups * K
    silent = silences_s(await made.stamped(config, "ledger"), config, hurt_s)
    told = f"{statistics.median(silent):.1f} / {max(silent):.1f}" if silent else "-"
    return row(name, len(hurt_s) if name != "none" else 0, groups, found.lost, found.doubled,
               found.torn, again, found.repeated, told)


def ends_of(ledger: list[tuple[float, object]], config: RunConfig) -> dict[int, list[float]]:
    """When each partition delivered something."""
    ends: dict[int, list[float]] = {p: [] for p in range(config.partitions)}
    for sent_s, record in ledger:
        if isinstance(record, Ended) and record.outcome is Outcome.DELIVERED:
            ends[record.n % config.partitions].append(sent_s)
    return ends


async def recovered(made: Rig, config: RunConfig, groups: int, hurt_s: float) -> None:
    """Wait until every partition has delivered again twice, or all is delivered."""
    while time.time() < hurt_s + LONGEST_S:
        ends = ends_of(await made.stamped(config, "ledger"), config)
        if all(sum(end > hurt_s for end in times) > 1 for times in ends.values()):
            return
        if sum(map(len, ends.values())) >= groups:
            return
        await asyncio.sleep(1)


def silences_s(
    ledger: list[tuple[float, object]], config: RunConfig, hurt_s: list[float]
) -> list[float]:
    """For each fault the longest time that a partition delivered nothing, until the next fault."""
    ends = ends_of(ledger, config)
    found = []
    for at_s, next_s in pairwise([*hurt_s, math.inf]):
        gaps = [
            after - before for times in ends.values() for before, after in pairwise(sorted(times))
            if after > at_s and before < next_s
        ]
        if gaps:
            found.append(max(gaps))
    return found


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


async def table(bootstrap: str, folder: Path, given: argparse.Namespace) -> None:
    pick = random.Random(given.seed)
    engine = Engine(folder / "engine", ANSWERS)
    await engine.start()
    try:
        async with rig(bootstrap, "chaos", folder, engine.url) as made:
            made.judge()
            for name in 2 * [*reversed(STAGES), "prompt-producer"]:
                await made.service(name)
            print(row(*COLUMNS), row(*["---"] * len(COLUMNS)), sep="\n", flush=True)
            for at, name in enumerate(FAULTS):
                if given.fault in name:
                    print(await measure(made, engine, name, at, given.minutes, pick), flush=True)
    finally:
        await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2, help="of load under each fault, about")
    parser.add_argument("--broker", choices=["embedded", "kafka"], default="embedded")
    parser.add_argument("--fault", default="", help="only faults whose name holds this")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        broker = brokers.start(given.broker, Path(folder))
        started_s = time.monotonic()
        try:
            asyncio.run(table(broker.bootstrap, Path(folder), given))
            minutes = (time.monotonic() - started_s) / 60
            print(f"{given.broker}, {os.cpu_count()} cores, seed {given.seed}: {minutes:.0f} min")
        finally:
            broker.stop()


if __name__ == "__main__":
    main()
