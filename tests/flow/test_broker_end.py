"""The embedded broker ends, or is full: everything ends loudly, and admission stops before."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from rig import Engine, rig

from rollstream.shared import brokers
from rollstream.shared.bus import Bus
from rollstream.shared.records import Issued

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


class Up:
    """A `rollstream up` in a folder of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self._flags = flags

    async def __aenter__(self) -> Up:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollstream.services.cli", "up", *self._flags,
            cwd=self.folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={k: v for k, v in os.environ.items() if k != "KAFKA_BOOTSTRAP_SERVERS"},
        )
        assert self.process.stdout is not None
        self.said = ""
        async with asyncio.timeout(60):
            while "ready;" not in self.said:
                line = await self.process.stdout.readline()
                assert line, "up has ended"
                self.said += line.decode()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.terminate()
            await asyncio.wait_for(self.process.wait(), 60)

    def children(self) -> dict[str, psutil.Process]:
        """The broker and the services, by what they are."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            words = child.cmdline()
            name = words[words.index("run") + 1] if "run" in words else Path(words[0]).name
            found[name] = child
        return found

    @property
    def bootstrap(self) -> str:
        return self.said.split("broker: embedded at ", 1)[1].split()[0]

    async def ended(self, services: dict[str, psutil.Process]) -> str:
        """It ends with 1, and so has every service; what `up` said of it, and each log's end."""
        said = (await asyncio.wait_for(self.process.communicate(), 60))[1].decode()
        assert self.process.returncode == 1
        assert not any(service.is_running() for service in services.values())
        for name in services:
            last = (self.folder / "runs" / "logs" / f"{name}.log").read_text().splitlines()[-1]
            assert "has ended, its data with it" in last or '"code":1' in last, last
        return said


async def test_when_the_broker_dies_everything_ends_with_one_line(tmp_path: Path):
    async with Up(tmp_path) as up:
        processes = up.children()
        broker = processes.pop("tansu")
        services = {n: p for n, p in processes.items() if n not in ("sh",)}
        assert len(services) == 5
        await asyncio.sleep(3)
        broker.kill()
        said = await up.ended(services)
        assert said.strip().count("\n") == 0
        assert "the embedded broker has ended" in said


async def test_at_its_memory_cap_the_broker_is_ended(tmp_path: Path):
    async with Up(tmp_path, "--broker-memory-mib", "120") as up:
        services = {n: p for n, p in up.children().items() if n not in ("sh", "tansu")}
        bus = Bus(up.bootstrap, "filler")
        writer = await bus.writer()
        filler = Issued(n=0, k=1, env="x" * 800_000)
        deadline_s = time.monotonic() + 60
        try:
            while up.process.returncode is None and time.monotonic() < deadline_s:
                async with asyncio.timeout(5):
                    await writer.send("filler", 0, filler)
        except Exception:
            pass  # the broker is gone, which is what this is about
        said = await up.ended(services)
        await writer.close()
        assert "reached 120 MiB" in said
        assert "--broker kafka" in said


async def test_a_nearly_full_broker_admits_nothing(tmp_path: Path, prefix: str):
    engine = Engine(tmp_path / "engine", [{"text": "1"}])
    await engine.start()
    broker = brokers.start("embedded", tmp_path / "broker")
    try:
        async with rig(broker.bootstrap, prefix, tmp_path, engine.url) as made:
            await made.services("sink", "scorer", "generator")
            cap = str(int(broker.rss_bytes() * 1.1))
            producer = await made.service(
                "prompt-producer", "--broker-pid", str(broker.pid), "--broker-memory-bytes", cap
            )
            config = await made.run("sft", "full", total_groups=4)
            async with asyncio.timeout(60):
                while "nothing new is admitted" not in producer.log.read_text():
                    await asyncio.sleep(0.2)
            assert (await made.books(config)).issued == 0
            assert "--broker kafka" in producer.log.read_text()
    finally:
        broker.stop()
        await engine.stop()
