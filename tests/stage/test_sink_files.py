"""File leaves against real brokers: files hold each group once and equal the ledger, whatever dies.

Kills are real: the sink runs in a process of its own that sends itself SIGKILL at the worst moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollstream.services.sink.parts import Folder, Line, read_lines
from rollstream.services.sink.service import Sink
from rollstream.shared.arrays import pack
from rollstream.shared.bus import Bus, Writer
from rollstream.shared.ledger import Ledger
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.log_reader import LogReader
from rollstream.shared.records import (
    EnvRef,
    Issued,
    Kind,
    Outcome,
    Row,
    Sample,
    Scored,
    Sequence,
    Stop,
)
from rollstream.shared.routes import builtin, stages
from rollstream.shared.runs import EnvironmentSource, RunConfig, SinkSettings, Status
from rollstream.shared.service import RunContext
from rollstream.shared.topics import create, run_specs

PARTITIONS = 4
K = 2
WAIT_S = 60.0


def config(prefix: str, out: Path, pipeline: str = "sft", log_id: str = "now") -> RunConfig:
    return RunConfig(
        run="r1", pipeline=pipeline, prefix=prefix, partitions=PARTITIONS, log_id=log_id, model="m",
        stages=stages(builtin(), pipeline, teacher=False), group_size=K,
        environments=[EnvironmentSource(id="sums")], sink=SinkSettings(out=str(out)),
    )


def group(run: RunConfig, n: int, kind: Kind = Kind.SCORED) -> Scored:
    sequence = Sequence(
        tokens=pack([1, 2, n], "int32"), mask=pack([0, 0, 1], "uint8"),
        logprobs=pack([0, 0, -0.5], "float32"),
    )
    samples = [
        Sample(i=i, stop=Stop.STOP, reward=float(i), sequences=[sequence],
               completion=[{"role": "assistant", "content": f"{n}.{i}"}])
        for i in range(K)
    ]
    return Scored(
        run=run.run, pipeline=run.pipeline, n=n, k=K, env=EnvRef(id="sums"), row_index=n,
        row=Row(prompt=[{"role": "user", "content": f"question {n}"}], answer="a"),
        kind=kind, reason="" if kind is Kind.SCORED else "why", samples=samples,
    )


@contextlib.asynccontextmanager
async def topics_of(run: RunConfig, bootstrap: str) -> AsyncIterator[Writer]:
    """The run's topics on the broker, and a writer to fill them."""
    bus = Bus(bootstrap, "test")
    admin = bus.admin()
    await admin.start()
    specs = run_specs(run.prefix, run.run, run.pipeline, ["scored", "ledger"], PARTITIONS)
    await create(admin, specs)
    await admin.close()
    writer = await bus.writer()
    yield writer
    await writer.close()


async def put(writer: Writer, run: RunConfig, *groups: Scored, issue: bool = True) -> None:
    name = f"{run.prefix}.{run.run}.{run.pipeline}"
    if issue:
        await asyncio.gather(*(
            writer.send(f"{name}.ledger", g.n % PARTITIONS, Issued(n=g.n, k=K)) for g in groups
        ))
    await asyncio.gather(*(
        writer.send(f"{name}.scored", g.n % PARTITIONS, g) for g in groups
    ))


async def until(bus: Bus, run: RunConfig, met: Callable[[Ledger], bool]) -> Ledger:
    deadline = time.monotonic() + WAIT_S
    while not met(books := await read_ledger(bus, run, 30)):
        assert time.monotonic() < deadline, books.books()
        await asyncio.sleep(0.1)
    return books


def ended(count: int) -> Callable[[Ledger], bool]:
    return lambda ledger: ledger.books()[0].issued == count and ledger.books()[0].in_flight == 0


class Member:
    """A sink at work in this process."""

    def __init__(self, run: RunConfig, bootstrap: str, name: str) -> None:
        self.context = RunContext(
            run, run.stages[-1], Bus(bootstrap, name, session_timeout_ms=1500)
        )
        self.task = asyncio.create_task(Sink().attend(self.context))

    async def end(self, status: Status = Status.DONE) -> None:
        """As the producer ends a run: done only once the leaf has said that its files are there."""
        if status is Status.DONE:
            self.context.status = Status.FINISHING
            await asyncio.wait_for(self._finished(), WAIT_S)
        else:
            self.context.draining.set()
        self.context.status = status
        await asyncio.wait_for(self.task, WAIT_S)

    async def _finished(self) -> None:
        async with LogReader(self.context.bus, self.context.topic("control"), [0]) as control:
            said: list[Any] = []
            async for records in control.to_end(WAIT_S):
                said += records
            while not any(b'"type":"finished"' in record.value for record in said):
                said += await control.more(0.1)


def lines_of(run: RunConfig, leaf: str = "dataset") -> list[Line]:
    topic = f"{run.prefix}.{run.run}.{run.pipeline}.scored"
    folder = Folder(Path(run.sink.out), leaf, topic=topic, log_id=run.log_id)
    return [line for part in folder.everything(PARTITIONS) for line in read_lines(part, Line)]


async def test_each_group_is_in_the_files_once_and_the_files_equal_the_ledger(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    run = config(prefix, tmp_path)
    async with topics_of(run, broker) as writer:
        await put(writer, run, *(group(run, n) for n in range(20)))
        await put(writer, run, group(run, 20, Kind.DROPPED))
        await put(writer, run, group(run, 21, Kind.PARKED), group(run, 22, Kind.PARKED))
        member = Member(run, broker, "one")
        books = await until(member.context.bus, run, ended(23))
        line = books.books()[0]
        assert (line.delivered, line.dropped, line.parked) == (20, {"why": 1}, 2)
        assert (line.reward_sum, line.reward_count) == (20.0, 40)
        await put(writer, run, group(run, 3), group(run, 22), issue=False)  # late, redriven
        books = await until(member.context.bus, run, lambda b: b.books()[0].parked == 1)
        await member.end()
    rows = [json.loads(each) for each in (tmp_path / "dataset.jsonl").read_text().splitlines()]
    assert [row["tokens"][0][2] for row in rows] == [*range(20), 22]
    assert rows[0]["messages"][1][-1] == {"role": "assistant", "content": "0.1"}
    from pyarrow import parquet

    table = parquet.read_table(tmp_path / "dataset.parquet").to_pylist()
    assert [(r["n"], r["i"]) for r in table] == [
        (n, i) for n in [*range(20), 22] for i in range(K)
    ]
    assert (table[3]["question"], table[3]["completion"], table[3]["reward"]) == (
        "question 1", "1.1", 1.0
    )
    assert table[3]["tokens"] == [1, 2, 1]


async def test_two_sinks_share_and_a_third_that_comes_and_goes_changes_nothing(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    run = config(prefix, tmp_path)
    async with topics_of(run, broker) as writer:
        first, second = Member(run, broker, "first"), Member(run, broker, "second")
        await put(writer, run, *(group(run, n) for n in range(30)))
        third = Member(run, broker, "third")
        await put(writer, run, *(group(run, n) for n in range(30, 60)))
        await until(first.context.bus, run, ended(60))
        await third.end(Status.RUNNING)
        await put(writer, run, *(group(run, n) for n in range(60, 80)))
        await until(first.context.bus, run, ended(80))
        assert first.context.progress.done > 0
        assert second.context.progress.done > 0
        await first.end()
        await second.end()
    assert sorted(line.n for line in lines_of(run)) == list(range(80))
    assert len((tmp_path / "dataset.jsonl").read_text().splitlines()) == 80


WORKER = """
import asyncio, os, signal, sys
import msgspec
from rollstream.services.sink import files
from rollstream.services.sink.service import Sink
from rollstream.shared.bus import Bus
from rollstream.shared.runs import RunConfig
from rollstream.shared.service import RunContext

run = msgspec.json.decode(sys.argv[1], type=RunConfig)
method, calls = sys.argv[3], [int(sys.argv[4])]
original = getattr(files.FileLeaf, method)

async def killed(self, *given):
    if given[-1]:  # neither an empty list of ends nor no consumer
        calls[0] -= 1
        if not calls[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    return await original(self, *given)

setattr(files.FileLeaf, method, killed)
bus = Bus(sys.argv[2], "worker", session_timeout_ms=1500)
asyncio.run(Sink().attend(RunContext(run, run.stages[-1], bus)))
"""


def killed_at(run: RunConfig, bootstrap: str, method: str, call: int) -> int:
    """Run a sink in a process that kills itself at the call of a method; its exit status."""
    config_text = msgspec.json.encode(run).decode()
    return subprocess.run(
        [sys.executable, "-c", WORKER, config_text, bootstrap, method, str(call)],
        timeout=WAIT_S, check=False,
    ).returncode


@pytest.mark.parametrize(("pipeline", "method"), [
    ("sft", "_to_ledger"), ("sft", "_commit"), ("eval", "_to_ledger"),
])
async def test_killed_between_part_and_ledger_or_before_the_commit(
    broker: str, prefix: str, tmp_path: Path, pipeline: str, method: str
) -> None:
    run = config(prefix, tmp_path, pipeline)
    leaf = run.stages[-1].leaf or ""
    async with topics_of(run, broker) as writer:
        await put(writer, run, *(group(run, n) for n in range(30)))
        for call in (1, 2):
            killed = await asyncio.to_thread(killed_at, run, broker, method, call)
            assert killed == -9
        half = await read_ledger(Bus(broker, "test"), run, 30)
        if method == "_to_ledger":
            assert len(lines_of(run, leaf)) > half.books()[0].delivered, "a part is ahead"
        await put(writer, run, *(group(run, n) for n in range(30, 40)))
        member = Member(run, broker, "last")
        books = await until(member.context.bus, run, ended(40))
        assert books.books()[0].delivered == 40
        await member.end()
    lines = lines_of(run, leaf)
    assert sorted(line.n for line in lines) == list(range(40))
    assert sum(line.reward_sum for line in lines) == books.books()[0].reward_sum


async def test_a_new_log_of_the_run_starts_from_the_parts_of_the_old_one(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    old = config(prefix, tmp_path, log_id="old")
    folder = Folder(tmp_path, "dataset", topic=f"{prefix}.r1.sft.scored", log_id="old")
    from rollstream.services.sink.decide import Decision

    folder.write(1, 0, 7, [Decision(n, Outcome.DELIVERED, "", group(old, n)) for n in (1, 5)])
    run = config(prefix, tmp_path, log_id="new")
    facts = await Sink().consider(run, run.stages[-1])
    assert facts["restored"] == [(1, 1), (5, 5)]
    async with topics_of(run, broker) as writer:
        member = Member(run, broker, "one")
        books = await until(
            member.context.bus, run, lambda b: b.ended_unissued("dataset") == [1, 5]
        )
        assert books.books()[0].issued == 0
        ledger = f"{prefix}.r1.sft.ledger"
        for n in (1, 5):
            await writer.send(ledger, 1, Issued(n=n, k=K, restored=True))
        await put(writer, run, group(run, 5), issue=False)  # generated again by mistake
        await put(writer, run, group(run, 0))
        books = await until(member.context.bus, run, ended(3))
        assert books.books()[0].delivered == 3
        await member.end()
    rows = [json.loads(each) for each in (tmp_path / "dataset.jsonl").read_text().splitlines()]
    assert [row["tokens"][0][2] for row in rows] == [0, 1, 5]


async def test_parts_that_go_beyond_the_log_are_loud(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    from rollstream.services.sink.decide import Decision
    from rollstream.shared.bus import Lost

    run = config(prefix, tmp_path)
    folder = Folder(tmp_path, "dataset", topic=f"{prefix}.r1.sft.scored", log_id="now")
    folder.write(0, 0, 50, [Decision(0, Outcome.DELIVERED, "", group(run, 0))])
    async with topics_of(run, broker) as writer:
        await put(writer, run, group(run, 0))
        member = Member(run, broker, "one")
        with pytest.raises(Lost, match="parts"):
            await asyncio.wait_for(member.task, WAIT_S)


async def test_the_report_stands_by_and_takes_over(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    run = config(prefix, tmp_path, "eval")
    async with topics_of(run, broker) as writer:
        members = [Member(run, broker, "first"), Member(run, broker, "second")]
        await put(writer, run, *(group(run, n) for n in range(10)))
        await until(members[0].context.bus, run, ended(10))
        active, other = sorted(members, key=lambda m: m.context.progress.done, reverse=True)
        assert other.context.progress.state == "standby"
        await active.end(Status.RUNNING)
        await put(writer, run, *(group(run, n) for n in range(10, 14)))
        await until(other.context.bus, run, ended(14))
        await other.end()
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["results"]["all"]["avg@2"] == 0.5
    assert metrics["results"]["atropos|sums|0"]["pass@2"] == 1.0
    samples = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [(json.loads(s)["n"], json.loads(s)["i"]) for s in samples] == [
        (n, i) for n in range(14) for i in range(K)
    ]
    assert json.loads((tmp_path / "evaluate_config.yaml").read_text())["env"]["run"] == "r1"
