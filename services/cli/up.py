"""rollstream up: a broker, an inference server if wanted, and all services, on this machine.

    rollstream up                          embedded broker: data lives as long as `up` does
    rollstream up --broker kafka           a durable Apache Kafka from KAFKA_HOME
    rollstream up --brokers host:9092      your own Kafka

Everything ends with it: Ctrl-C leaves no process behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollstream.shared import brokers as broker_launcher
from rollstream.shared.brokers.broker import BrokerError
from rollstream.shared.brokers.connection import check, client_options
from rollstream.shared.config import ConfigError, Parser, parse_flags, read_file
from rollstream.shared.inference.endpoints import Endpoint
from rollstream.shared.settings import (
    BROKERS_VARIABLE,
    ServiceSettings,
    check_file,
    load_settings,
    service_table,
)

from .connect import UP_FILE, UpFile, only_up
from .processes import CannotStart, Child, Children, service_child
from .run_settings import DEFAULT_PARTITIONS

SERVICES = ("sink", "scorer", "teacher-distiller", "generator", "prompt-producer")
"""Started in this order: readers before writers, so that nothing waits."""

EMBEDDED_PARTITIONS = 4
GUARD_S = 0.5
SERVICES_END_S = 10.0
ENGINE_START_S = 600.0
"""The first start converts the model."""
SERVICES_START_S = 180.0


@dataclass
class Stack:
    """What is up: where the broker and the engine are."""

    brokers: str
    partitions: int
    kind: str
    broker_pid: int = 0
    endpoint: str = ""
    model: str = ""


Work = Callable[[argparse.Namespace, Stack, Children], Coroutine[None, None, int]]
"""What is to be done once everything is up; the exit code."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `up` and `demo` share."""
    parser.add_argument("--config", help="a TOML file with [endpoints.NAME] and service sections")
    parser.add_argument("--folder", default="runs", help="logs and data [runs]")
    parser.add_argument("--broker", choices=["embedded", "kafka"], default=None,
                        help="start one here [embedded, unless brokers are given]")
    parser.add_argument("--broker-memory-mib", type=int, default=2048,
                        help="embedded: end at this much memory, admit nothing above 80 %% [2048]")
    parser.add_argument("--brokers", default=None, help=f"use these [{BROKERS_VARIABLE}]")
    parser.add_argument("--engine", action="store_true", help="serve a model with the CPU engine")
    parser.add_argument("--model", default=os.environ.get("MODEL", "smollm2"),
                        help="the engine's model: smollm2 or a path [MODEL]")
    parser.add_argument("--engine-flags", default="", help="more flags for the engine")
    parser.add_argument("--service-flags", default="", help="more flags for every service")


def main(command: str, argv: list[str]) -> int:
    """Bring everything up and stay until told to end."""
    parser = Parser(
        prog="rollstream up", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)

    async def stay(_given: argparse.Namespace, stack: Stack, children: Children) -> int:
        print("ready; in another terminal here: rollstream rl|sft|eval --env ID ..., "
              "rollstream runs list. Ctrl-C ends everything.", flush=True)
        while True:
            children.check()
            await asyncio.sleep(0.5)

    return run_stack("up", parser, argv, stay)


def run_stack(
    name: str, parser: argparse.ArgumentParser, argv: list[str], work: Work
) -> int:
    """Bring the stack up, do the work, end the stack whatever happens; the exit code."""
    try:
        given = argparse.Namespace(**parse_flags(parser, argv))
        with only_up():
            return asyncio.run(_run(given, work))
    except (ConfigError, BrokerError, CannotStart) as error:
        print(f"rollstream {name}: {error}", file=sys.stderr)
        return 2
    except BrokerGone as error:
        print(f"rollstream {name}: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"rollstream {name}: ended, nothing is left running", file=sys.stderr)
        return 130


async def _run(given: argparse.Namespace, work: Work) -> int:
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: task.cancel() if task else None)
    table = read_file(given.config)
    check_file(table)
    settings = load_settings(service_table(table, ""), {"brokers": given.brokers})
    folder = _writable(Path(given.folder))
    children = Children()
    broker = None
    try:
        stack, broker = await _broker(given, folder, settings)
        await _engine(given, stack, folder, children)
        await _services(given, stack, folder, children, settings)
        UP_FILE.write_bytes(msgspec.json.encode(UpFile(
            stack.brokers, stack.partitions, os.getpid(), stack.model, stack.endpoint,
        )))
        if broker is None:
            return await work(given, stack, children)
        return await _guarded(work(given, stack, children), broker, children, given)
    finally:
        # A second Ctrl-C must not interrupt the clean-up.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: None)
        await children.stop()
        if broker is not None:
            await asyncio.to_thread(broker.stop)


async def _guarded(
    work: Coroutine[None, None, int], broker: broker_launcher.Broker, children: Children,
    given: argparse.Namespace,
) -> int:
    """The work's exit code, as long as the broker lives and keeps within its memory.

    Raises BrokerGone; the services have said the same and ended by then.
    """
    task = asyncio.ensure_future(work)
    cap_bytes = given.broker_memory_mib * 2**20
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=GUARD_S)
            full = broker.kind == "embedded" and broker.rss_bytes() >= cap_bytes > 0
            if full:
                await asyncio.to_thread(broker.kill)
            if full or not broker.alive():
                await children.left_alone(SERVICES_END_S)
                why = (
                    f"reached {given.broker_memory_mib} MiB and was ended (give it more with "
                    "--broker-memory-mib, or use --broker kafka)"
                    if full else f"has ended, see {broker.log_path}"
                )
                raise BrokerGone(f"the {broker.kind} broker {why}")
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=SERVICES_END_S)


class BrokerGone(Exception):
    """The broker that `up` had started is no more; one line says why."""


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(
            "--folder", str(folder), f"give one that can be written to ({error})"
        ) from error


async def _broker(
    given: argparse.Namespace, folder: Path, settings: ServiceSettings
) -> tuple[Stack, broker_launcher.Broker | None]:
    if given.broker and given.brokers:
        raise ConfigError("--broker", given.broker, "leave it out where --brokers names others")
    outside = "" if given.broker else settings.brokers
    if outside:
        options = client_options(settings.security)
        if (reason := await check(outside, options)) is not None:
            raise ConfigError("--brokers", outside, reason)
        print(f"broker: {outside}")
        return Stack(outside, DEFAULT_PARTITIONS, "outside"), None
    kind = given.broker or "embedded"
    if kind == "embedded":
        print("broker: embedded, in memory: topics live as long as this command does "
              "(durable: --broker kafka)", flush=True)
    broker = await asyncio.to_thread(broker_launcher.start, kind, folder)
    partitions = EMBEDDED_PARTITIONS if kind == "embedded" else DEFAULT_PARTITIONS
    print(f"broker: {kind} at {broker.bootstrap}", flush=True)
    return Stack(broker.bootstrap, partitions, kind, broker.pid), broker


async def _engine(
    given: argparse.Namespace, stack: Stack, folder: Path, children: Children
) -> None:
    if not given.engine:
        return
    command = [
        sys.executable, "-m", "rollstream.services.engine", "--port", "0", "--model", given.model,
        "--parent-pid", str(os.getpid()), *given.engine_flags.split(),
    ]
    child = Child("engine", command, folder / "logs" / "engine.log", serves_others=True)
    print("engine: loading the model ...", flush=True)
    await children.start(child)
    line = await children.wait_for_line(child, "engine ready on", ENGINE_START_S)
    words = line.split("engine ready on ", 1)[1].split()
    stack.endpoint = words[0]
    stack.model = next(w for w in words if w.startswith("model=")).removeprefix("model=")
    print(f"engine: {stack.model} at {stack.endpoint}", flush=True)


async def _services(
    given: argparse.Namespace, stack: Stack, folder: Path, children: Children,
    settings: ServiceSettings,
) -> None:
    flags = ["--brokers", stack.brokers, "--drain-s", "5"]
    if given.config:
        flags += ["--config", given.config]
    if stack.endpoint:
        endpoints = {**settings.endpoints, "default": Endpoint(url=stack.endpoint)}
        flags += ["--endpoints", msgspec.json.encode(endpoints).decode()]
    if stack.kind == "embedded":
        # It waits half a session timeout at each join.
        flags += ["--broker-lost-s", "8", "--session-timeout-ms", "6000"]
        flags += ["--broker-pid", str(stack.broker_pid),
                  "--broker-memory-bytes", str(given.broker_memory_mib * 2**20)]
    flags += given.service_flags.split()
    started = [service_child(name, folder, {}, *flags) for name in SERVICES]
    for child in started:
        await children.start(child)
    for child in started:
        await children.wait_for_line(child, '"event":"started"', SERVICES_START_S)
    print(f"services: {', '.join(reversed(SERVICES))} (logs in {folder / 'logs'})", flush=True)
