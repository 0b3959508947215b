"""How a command finds the broker: a flag, KAFKA_BOOTSTRAP_SERVERS, or a running `rollstream up`."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from rollstream.shared.brokers.connection import Security, check, client_options
from rollstream.shared.bus import Bus
from rollstream.shared.config import ConfigError
from rollstream.shared.settings import BROKERS_VARIABLE

T = TypeVar("T")
UP_FILE = Path("runs") / "up.json"


class UpFile(msgspec.Struct):
    """What a running `rollstream up` leaves for other commands in the same folder."""

    brokers: str
    partitions: int
    pid: int
    model: str = ""
    endpoint: str = ""


def running_up() -> UpFile | None:
    """The `rollstream up` of this folder, if one runs."""
    try:
        found = msgspec.json.decode(UP_FILE.read_bytes(), type=UpFile)
        os.kill(found.pid, 0)
    except (OSError, msgspec.MsgspecError):
        return None
    return found


def find_brokers(flag: str | None) -> str:
    """The bootstrap servers.

    Raises ConfigError where nothing names them.
    """
    if flag:
        return flag
    if variable := os.environ.get(BROKERS_VARIABLE):
        return variable
    up = running_up()
    if up is None:
        raise ConfigError(
            "--brokers", "(not given)",
            f"give host:port, set {BROKERS_VARIABLE}, or start `rollstream up` here",
        )
    return up.brokers


async def open_bus(brokers: str, security: Security | None = None) -> Bus:
    """A Bus to a broker that answers.

    Raises ConfigError with the reason where it does not.
    """
    options = client_options(security or Security())
    if (reason := await check(brokers, options)) is not None:
        raise ConfigError("--brokers", brokers, reason)
    return Bus(brokers, f"rollstream-cli-{os.getpid()}-{secrets.token_hex(2)}", options)


def run_async(work: Callable[[], Awaitable[T]]) -> T:
    """Run a command's coroutine."""

    async def call() -> T:
        return await work()

    return asyncio.run(call())
