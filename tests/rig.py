"""All services as real processes over a real broker, for flow and chaos tests."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollstream.services.cli.processes import (
    FIRST_PAUSE_S,
    Child,
    Children,
    service_child,
)
from rollstream.services.cli.propose import propose
from rollstream.services.cli.run_settings import RunSettings, to_config
from rollstream.services.cli.up import SERVICES
from rollstream.shared import routes
from rollstream.shared.brokers.broker import free_port
from rollstream.shared.bus import Bus
from rollstream.shared.codec import decode
from rollstream.shared.ledger import LeafBooks
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.log_reader import LogReader
from rollstream.shared.registry import read_registry, set_status
from rollstream.shared.runs import RunConfig, Sampling, SinkSettings, Status
from rollstream.shared.settings import BROKERS_VARIABLE
from rollstream.shared.topics import data_topic

MODEL = "smollm2-135m"
TWO_DIGIT = "two_digit_addition"


class Rig:
    """Services on one broker with one prefix; everything that it starts ends with it."""

    def __init__(self, bootstrap: str, prefix: str, folder: Path, endpoint: str) -> None:
        self.folder = folder
        self.endpoint = endpoint
        self.prefix = prefix
        self.bus = Bus(bootstrap, f"test-{prefix}")
        self.children = Children()
        self._environment = {BROKERS_VARIABLE: bootstrap, "ROLLSTREAM_PREFIX": prefix}
        self._count = 0

    def judge(self, name: str = "environments") -> Path:
        """Make `judge_env` known to services that start from now on; the folder that steers it."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        source = Path(__file__).parent / "environments" / "judge_env.py"
        (folder / source.name).write_text(source.read_text())
        self._environment["PYTHONPATH"] = str(folder)
        return folder

    async def command(self, *arguments: str, code: int = 0) -> str:
        """What a `rollstream` command prints; it must end with this exit code."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollstream.services.cli", *arguments,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self._environment},
        )
        said, _ = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == code, said.decode()
        return said.decode()

    async def service(self, name: str, *flags: str) -> Child:
        """Start one service."""
        self._count += 1
        endpoints = json.dumps({"default": {"url": self.endpoint}})
        child = service_child(
            name, self.folder, self._environment, "--endpoints", endpoints,
            "--session-timeout-ms", "6000", "--startup-wait-s", "20", *flags,
        )
        child.log = self.folder / "logs" / f"{name}-{self._count}.log"
        await self.children.start(child)
        return child

    async def kill(self, child: Child) -> None:
        """kill -9, and it stays down."""
        child.wanted = False
        signalled(child, signal.SIGKILL)
        assert child.process is not None
        await asyncio.wait_for(child.process.wait(), 10)

    async def leave(self, child: Child) -> int:
        """SIGTERM, and it stays down; its exit code."""
        child.wanted = False
        signalled(child, signal.SIGTERM)
        assert child.process is not None
        return await asyncio.wait_for(child.process.wait(), 120)

    def hurt(self, name: str, pick: random.Random) -> Child:
        """kill -9 one process of a service at random; it is started again after a second."""
        victim = pick.choice([c for c in self.children.running() if c.name == name])
        victim.pause_s = FIRST_PAUSE_S
        signalled(victim, signal.SIGKILL)
        return victim

    async def filled(self, config: RunConfig, kind: str, records: int) -> None:
        """Wait until one of the run's topics has got so many records."""
        deadline_s = time.monotonic() + 90
        while await self.written(config, kind) < records:
            assert time.monotonic() < deadline_s, f"{kind} was not filled\n{self.logs()}"
            await asyncio.sleep(0.3)

    async def services(self, *names: str) -> dict[str, Child]:
        """Start these, or all five."""
        return {name: await self.service(name) for name in names or SERVICES}

    async def run(
        self, pipeline: str, name: str, rows: Sequence[Mapping[str, Any]] = (), **fields: Any
    ) -> RunConfig:
        """Start a run on two-digit addition, with routing rows of its own. Raises Refused."""
        defaults: dict[str, Any] = {
            "run": name, "env": TWO_DIGIT, "endpoint": "default", "model": MODEL,
            "partitions": 4, "sampling": Sampling(max_tokens=14), "group_size": 4,
            "sink": SinkSettings(out=str(self.folder / name), port=free_port()),
            "prefix": self.prefix, "include_messages": True,
        }
        settings = msgspec.structs.replace(RunSettings(), **{**defaults, **fields})
        config = to_config(pipeline, settings, routes.load(rows))
        return await propose(self.bus, config, 180.0)

    async def done(self, config: RunConfig, timeout_s: float = 120.0) -> None:
        """Wait until the run is done."""
        await self.reaches(config, Status.DONE, timeout_s)

    async def reaches(self, config: RunConfig, status: Status, timeout_s: float = 120.0) -> None:
        """Wait until the run is in this state."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            found = (await read_registry(self.bus, self.prefix)).runs[config.run]
            if found.status is status:
                return
            await asyncio.sleep(0.3)
        raise AssertionError(
            f"{config.run} is not {status}: {await self.books(config)}\n{self.logs()}"
        )

    async def stands(self, config: RunConfig, **counts: int) -> None:
        """Wait until the books say so, e.g. `delivered=4, parked=2`."""
        deadline_s = time.monotonic() + 90
        while True:
            books = await self.books(config)
            if all(getattr(books, name) == count for name, count in counts.items()):
                return
            assert time.monotonic() < deadline_s, f"not {counts}: {books}\n{self.logs()}"
            await asyncio.sleep(0.3)

    async def stop(self, config: RunConfig) -> None:
        await set_status(self.bus, self.prefix, config.run, Status.STOPPED, "by a test")

    async def books(self, config: RunConfig) -> LeafBooks:
        """The books of the run's only leaf."""
        return (await read_ledger(self.bus, config, 60)).books()[0]

    async def records(self, config: RunConfig, kind: str) -> list[Any]:
        """All records of one of the run's topics."""
        return [record for _, record in await self.stamped(config, kind)]

    async def stamped(self, config: RunConfig, kind: str) -> list[tuple[float, Any]]:
        """All records of one of the run's topics, each after the time it was sent at, in s."""
        topic = data_topic(self.prefix, config.run, config.pipeline, kind)
        found: list[tuple[float, Any]] = []
        async with LogReader(self.bus, topic, range(config.partitions)) as log:
            async for records in log.to_end(timeout_s=60):
                found += [(r.timestamp / 1000, decode(r.value, list(r.headers))) for r in records]
        return found

    async def written(self, config: RunConfig, kind: str) -> int:
        """How many records one of the run's topics ever got, deleted ones too."""
        topic = data_topic(self.prefix, config.run, config.pipeline, kind)
        async with LogReader(self.bus, topic, range(config.partitions)) as log:
            await log.rewind()
            return sum((await log.ends(60)).values())

    def dataset(self, config: RunConfig) -> list[dict[str, Any]]:
        """The lines of a dataset run's JSONL."""
        text = (Path(config.sink.out) / "dataset.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def logs(self) -> str:
        """The end of every service's log."""
        return "\n".join(
            f"== {path.name}\n" + path.read_text(errors="replace")[-1500:]
            for path in sorted((self.folder / "logs").glob("*.log"))
        )

    async def end(self) -> None:
        await self.children.stop()


def signalled(child: Child, number: int) -> None:
    """Send a signal to a running child."""
    assert child.process is not None
    child.process.send_signal(number)


async def page(child: Child, path: str) -> tuple[int, str]:
    """Status and text of one of a service's pages. Raises OSError."""
    ports = re.findall(r'"health_port":(\d+)', said := child.log.read_text())
    if not ports:
        raise ConnectionError(f"{child.log} names no port yet: {said}")

    def get() -> tuple[int, str]:
        try:
            url = f"http://127.0.0.1:{ports[-1]}{path}"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(get)


async def status(child: Child) -> dict[str, Any]:
    """How a service stands in the only run that it attends; {} where it can't say."""
    try:
        attended = json.loads((await page(child, "/statusz"))[1])
    except OSError:
        return {}
    return next(iter(attended.values()), {})


@asynccontextmanager
async def rig(
    bootstrap: str, prefix: str, folder: Path, endpoint: str
) -> AsyncIterator[Rig]:
    """A Rig for the block."""
    made = Rig(bootstrap, prefix, folder, endpoint)
    try:
        yield made
    finally:
        await made.end()


class Engine:
    """The CPU engine as a process; with a script it gives the answers of the script."""

    def __init__(self, folder: Path, script: list[dict[str, Any]] | None = None) -> None:
        command = [sys.executable, "-m", "rollstream.services.engine", "--port", "0",
                   "--parent-pid", str(os.getpid())]
        folder.mkdir(parents=True, exist_ok=True)
        if script is not None:
            path = folder / "script.jsonl"
            path.write_text("\n".join(map(json.dumps, script)))
            command += ["--script", str(path)]
        self.child = Child("engine", command, folder / "engine.log")
        self.url = ""

    async def start(self) -> None:
        self.child.log.write_bytes(b"")
        await self.child.start()
        line = await Children().wait_for_line(self.child, "engine ready on", 300)
        self.url = line.split("engine ready on ", 1)[1].split()[0]

    async def again(self) -> None:
        """Start it once more where it was, after it was killed."""
        command = self.child.command
        command[command.index("--port") + 1] = self.url.split(":")[2].partition("/")[0]
        await self.start()

    def finished_requests(self, reason: str = "") -> int:
        """Choices that the engine has answered, by its own metrics; those with this end only.

        A scripted answer ends with `stop`; a probe and a teacher's question do not.
        """
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/metrics", timeout=5) as page:
            text = page.read().decode()
        return int(sum(
            float(value) for value in re.findall(
                rf'^vllm:request_success_total\{{[^}}]*{reason}"[^}}]*\}} (\S+)', text, re.M
            )
        ))

    async def stop(self) -> None:
        if self.child.process is not None and self.child.running:
            self.child.process.terminate()
            await asyncio.wait_for(self.child.process.wait(), 10)
