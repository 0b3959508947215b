"""How many rollouts a second go through all five services, with an engine that costs nothing.

    .venv/bin/python bench/pipeline.py --groups 400            (embedded broker)
    KAFKA_HOME=... .venv/bin/python bench/pipeline.py --broker kafka

Prints one line: rollouts/s from the first prompt to the last end in the ledger, and CPU seconds per
thousand rollouts of each service. Groups of 8, sft, two-digit addition, one process of each.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from rig import Engine, rig

from rollstream.shared import brokers

ANSWERS = [{"text": f"{n} + 1 = {n + 1}"} for n in range(9)]


async def measure(bootstrap: str, folder: Path, groups: int) -> str:
    engine = Engine(folder / "engine", ANSWERS)
    await engine.start()
    try:
        async with rig(bootstrap, "bench", folder, engine.url) as made:
            children = await made.services("sink", "scorer", "generator", "prompt-producer")
            await made.run("sft", "warm-up", total_groups=8, group_size=8)
            await asyncio.sleep(10)
            before = {name: _cpu_s(child.process.pid) for name, child in children.items()}  # type: ignore[union-attr]
            config = await made.run("sft", "bench", total_groups=groups, group_size=8)
            started_s = time.monotonic()
            while (await made.books(config)).delivered < groups:
                await asyncio.sleep(0.2)
            seconds = time.monotonic() - started_s
            used = {
                name: (_cpu_s(child.process.pid) - before[name]) / groups / 8 * 1e6  # type: ignore[union-attr]
                for name, child in children.items()
            }
    finally:
        await engine.stop()
    shares = ", ".join(f"{name} {value:.0f}" for name, value in used.items())
    return f"{groups * 8 / seconds:.0f} rollouts/s; CPU ms per 1000 rollouts: {shares}"


def _cpu_s(pid: int) -> float:
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(sum(p.cpu_times()[:2]) for p in family)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--broker", choices=["embedded", "kafka"], default="embedded")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        broker = brokers.start(given.broker, Path(folder))
        try:
            print(asyncio.run(measure(broker.bootstrap, Path(folder), given.groups)))
        finally:
            broker.stop()


if __name__ == "__main__":
    main()
