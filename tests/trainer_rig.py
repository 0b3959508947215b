"""A trainer sink in this process over a real broker, with the topics and groups that it needs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from rollstream.services.sink.service import Sink
from rollstream.shared.arrays import pack
from rollstream.shared.bus import Bus, Writer
from rollstream.shared.codec import decode
from rollstream.shared.ledger import Ledger
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.log_reader import LogReader
from rollstream.shared.records import (
    EnvRef,
    Issued,
    Kind,
    Row,
    Sample,
    Scored,
    Sequence,
    Stop,
    VersionSpan,
)
from rollstream.shared.routes import builtin, stages
from rollstream.shared.runs import EnvironmentSource, RunConfig, SinkSettings
from rollstream.shared.service import RunContext
from rollstream.shared.topics import create, run_specs

PARTITIONS = 3
K = 2
BATCH = 4
WAIT_S = 60.0
REGISTRATION = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": BATCH, "max_token_len": 2048,
    "checkpoint_dir": "", "save_checkpoint_interval": 10, "starting_step": 0, "num_steps": 10,
}


def config(prefix: str, out: Path, log_id: str = "now", **fields: Any) -> RunConfig:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings: dict[str, Any] = {"group_size": K, "batch_size": BATCH, **fields}
    return RunConfig(
        run="r1", pipeline="rl", prefix=prefix, partitions=PARTITIONS, log_id=log_id, model="m",
        stages=stages(builtin(), "rl", teacher=False),
        environments=[EnvironmentSource(id="sums")],
        sink=SinkSettings(out=str(out), port=port), **settings,
    )


def group(n: int, version: int = 0, kind: Kind = Kind.SCORED) -> Scored:
    sequence = Sequence(
        tokens=pack([1, 2, n], "int32"), mask=pack([0, 0, 1], "uint8"),
        logprobs=pack([0, 0, -0.5], "float32"), versions=[VersionSpan(version, 2, 3)],
    )
    return Scored(
        run="r1", pipeline="rl", n=n, k=K, env=EnvRef(id="sums"), row=Row(prompt=[]), kind=kind,
        samples=[Sample(i=i, stop=Stop.STOP, reward=float(i), sequences=[sequence])
                 for i in range(K)],
    )


@contextlib.asynccontextmanager
async def topics_of(run: RunConfig, bootstrap: str) -> AsyncIterator[Writer]:
    bus = Bus(bootstrap, "test")
    admin = bus.admin()
    await admin.start()
    await create(admin, run_specs(run.prefix, "r1", "rl", ["scored", "ledger"], PARTITIONS))
    await admin.close()
    writer = await bus.writer()
    yield writer
    await writer.close()


async def put(writer: Writer, run: RunConfig, *groups: Scored) -> None:
    name = f"{run.prefix}.r1.rl"
    await asyncio.gather(*(
        writer.send(f"{name}.ledger", g.n % PARTITIONS, Issued(n=g.n, k=K)) for g in groups
    ))
    await asyncio.gather(*(writer.send(f"{name}.scored", g.n % PARTITIONS, g) for g in groups))


class Member:
    """A trainer sink at work in this process, and a plain HTTP client for it."""

    def __init__(self, run: RunConfig, bootstrap: str, name: str = "one") -> None:
        self.run = run
        self.bus = Bus(bootstrap, name, session_timeout_ms=1500)
        self.context = RunContext(run, run.stages[-1], self.bus)
        self.task = asyncio.create_task(Sink().attend(self.context))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.run.sink.port}"

    async def up(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.context.progress.state not in ("serving", "waiting for a trainer"):
            assert not self.task.done(), self.task.exception()
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    async def call(self, path: str, body: Any = None, method: str = "") -> Any:
        method = method or ("GET" if body is None else "POST")
        async with aiohttp.ClientSession() as session, session.request(
            method, self.url + path, json=body
        ) as response:
            return await response.json()

    async def batch(self, query: str = "") -> Any:
        """The next answer that is a batch, or says that there is none any more."""
        deadline = time.monotonic() + WAIT_S
        while True:
            answer = await self.call(f"/batch{query}")
            if answer["batch"] is not None or answer.get("done"):
                return answer
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)

    async def ledger(self, met: Callable[[Ledger], bool] = lambda _: True) -> Any:
        deadline = time.monotonic() + WAIT_S
        while not met(books := await read_ledger(self.bus, self.run, 30)):
            assert time.monotonic() < deadline, books.books()
            await asyncio.sleep(0.1)
        return books.books()[0]

    async def control(self) -> list[Any]:
        async with LogReader(self.bus, self.context.topic("control"), [0]) as reader:
            return [decode(raw.value, list(raw.headers))
                    async for records in reader.to_end(30) for raw in records]

    async def drain(self) -> None:
        self.context.draining.set()
        await asyncio.wait_for(self.task, WAIT_S)

    async def kill(self) -> None:
        """As near to a kill as one process gets: nothing is flushed or finished."""
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=WAIT_S)


def numbers(answer: Any) -> list[int]:
    return [fields["tokens"][0][2] for fields in answer["batch"]]
