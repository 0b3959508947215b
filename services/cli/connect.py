"""How a command finds the broker: settings, KAFKA_BOOTSTRAP_SERVERS, or a running `rollstream up`.

A running `up` holds a lock beside its file; the kernel lets go of it whatever becomes of it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from rollstream.shared.brokers.connection import Security, check, client_options
from rollstream.shared.bus import Bus
from rollstream.shared.config import ConfigError, add_flags, read_file, resolve
from rollstream.shared.settings import BROKERS_VARIABLE, check_file, with_brokers

T = TypeVar("T")
UP_FILE = Path("runs") / "up.json"
UP_LOCK = Path("runs") / "up.lock"


class UpFile(msgspec.Struct):
    """What a running `rollstream up` leaves for other commands in the same folder."""

    brokers: str
    partitions: int
    pid: int
    model: str = ""
    endpoint: str = ""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """What a command about runs needs to know."""

    brokers: Annotated[
        str, Meta(description=f"host:port,... [{BROKERS_VARIABLE}, or of `rollstream up`]")
    ] = ""
    prefix: Annotated[str, Meta(description="all topics begin with it")] = "rollstream"
    security: Security = Security()


def add_reach_flags(parser: ArgumentParser) -> None:
    """The flags that `load_reach` reads."""
    parser.add_argument("--config", help="a TOML file, as services take it")
    add_flags(parser, Reach)


def load_reach(given: Mapping[str, Any]) -> Reach:
    """How to reach the runs, by flags, variables and file. Raises ConfigError."""
    table = read_file(given["config"])
    check_file(table)
    own = {key: table[key] for key in Reach.__struct_fields__ if key in table}
    return resolve(Reach, table=own, variables=with_brokers(os.environ), flags=given)


def running_up() -> UpFile | None:
    """The `rollstream up` of this folder, if one runs and is ready."""
    try:
        with UP_LOCK.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            return msgspec.json.decode(UP_FILE.read_bytes(), type=UpFile)
        except (OSError, msgspec.MsgspecError):
            return None
    except OSError:
        return None
    return None


@contextmanager
def only_up() -> Iterator[None]:
    """Be this folder's one `rollstream up`. Raises ConfigError where there is another."""
    try:
        UP_LOCK.parent.mkdir(parents=True, exist_ok=True)
        lock = UP_LOCK.open("ab")
    except OSError as error:
        raise ConfigError(
            "folder", str(UP_LOCK.parent), f"start it where files can be written ({error})"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                "folder", str(UP_LOCK.parent.absolute()),
                "`rollstream up` or `demo` runs here already: end it, or start in another folder",
            ) from error
        UP_FILE.unlink(missing_ok=True)
        try:
            yield
        finally:
            UP_FILE.unlink(missing_ok=True)


def find_brokers(given: str) -> str:
    """The bootstrap servers, of the folder's `rollstream up` where settings name none.

    Raises ConfigError where nothing names them.
    """
    if given:
        return given
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
    """Run a command's coroutine; SIGTERM ends it as Ctrl-C does, its clean-up included.

    Raises KeyboardInterrupt then.
    """

    async def call() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work()

    try:
        return asyncio.run(call())
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
