"""A service process: settings, broker, health, the runs it attends, and a clean end.

    rollstream run scorer --brokers localhost:9092        (or: python -m rollstream.services.scorer)

Exit codes: 0 ended as asked, 1 lost the broker or got stuck, 2 can't start (one line says why).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import structlog
from aiokafka.errors import KafkaError

from rollstream.shared import config, telemetry
from rollstream.shared.attendance import Attendance
from rollstream.shared.brokers.connection import check, client_options
from rollstream.shared.brokers.room import BrokerRoom
from rollstream.shared.bus import Bus, Lost, start, stop
from rollstream.shared.health import Health, HealthServer, beat_event_loop, exit_when_stuck
from rollstream.shared.inference.client import InferenceClient
from rollstream.shared.inference.types import InferenceError
from rollstream.shared.metrics import configure_metrics
from rollstream.shared.runs import Refusal
from rollstream.shared.service import Service, load
from rollstream.shared.settings import (
    BROKERS_VARIABLE,
    ServiceSettings,
    check_file,
    load_settings,
    service_table,
)
from rollstream.shared.topics import TopicError, check_prefix, create, runs_spec
from rollstream.shared.vigil import Vigil

BROKER_CHECK_S = 2.0
SERVER_CHECK_S = 3.0
LOOP_STUCK_S = 60.0
_PR_SET_PDEATHSIG = 1


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """Run one service until it is told to end; its exit code."""
    parser = config.Parser(
        prog=f"rollstream run {name}",
        description=f"Attend runs as {name}, from any broker's runs topic.",
    )
    parser.add_argument("--config", help="a TOML file")
    parser.add_argument("--check", action="store_true", help="look whether it could start, and end")
    parser.add_argument("--print-config", action="store_true", help="show the settings, and end")
    parser.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)
    config.add_flags(parser, ServiceSettings)
    given: dict[str, Any] = {}
    try:
        given = config.parse_flags(parser, argv)
        table = config.read_file(given.pop("config"))
        check_file(table)
        settings = load_settings(service_table(table, name), given)
        if settings.instance.partition(":")[0] not in ("", name):
            raise config.ConfigError(
                "--instance", settings.instance, f"give {name} or {name}:NAME"
            )
        if given["print_config"]:
            print(config.printable(settings))
            return 0
        if given["with_parent"]:
            _end_with_parent()
        telemetry.configure_logging(name, settings.log_level)
        telemetry.configure_tracing(name)
        configure_metrics(name)
        service = load(name, settings)
        return asyncio.run(_Process(name, service, settings).run(check_only=given["check"]))
    except (config.ConfigError, ModuleNotFoundError, Refusal, TopicError, Lost, KafkaError,
            TimeoutError) as error:
        print(f"rollstream run {name}: {error}", file=sys.stderr)
        return 1 if given.get("check") else 2
    except KeyboardInterrupt:
        return 0


def _end_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the process that started us is gone, kill -9 included."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Process:
    def __init__(self, name: str, service: Service, settings: ServiceSettings) -> None:
        self._name = name
        self._service = service
        self._settings = settings
        self._asked_to_end = asyncio.Event()
        self._log = structlog.get_logger().bind(service=name)

    async def run(self, *, check_only: bool) -> int:
        settings = self._settings
        if not settings.brokers:
            raise config.ConfigError(
                "--brokers", "(not given)", f"give host:port, or set {BROKERS_VARIABLE}"
            )
        check_prefix(settings.prefix)
        options = client_options(settings.security)
        if check_only:
            await self._check_alone()
        reason = await self._reach_broker(options, 0.0 if check_only else settings.startup_wait_s)
        if reason is not None:
            raise config.ConfigError("--brokers", settings.brokers, reason)
        if check_only:
            print(f"{self._name}: ready to start, {settings.brokers} answers")
            return 0
        client_id = f"{self._name}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        bus = Bus(
            settings.brokers, client_id, options, session_timeout_ms=settings.session_timeout_ms
        )
        await self._ensure_runs_topic(bus)
        attendance = Attendance(
            self._service, bus, settings.prefix, run=settings.run, instance=settings.instance,
            drain_s=settings.drain_s,
        )
        return await self._attend(attendance, bus, options)

    async def _check_alone(self) -> None:
        """What else would keep it from starting: its port, and what the service looks at itself.

        Raises ConfigError and Refusal.
        """
        port = HealthServer(
            self._settings.health_port, Health(), host=self._settings.health_host
        )
        await port.start()
        await port.stop()
        names = getattr(self._service, "endpoints_asked", list)()
        for endpoint in map(self._settings.endpoint, names):
            try:
                client = InferenceClient(
                    endpoint.urls, api_key=endpoint.api_key(), max_concurrent=1,
                    request_timeout_s=SERVER_CHECK_S,
                )
                async with client:
                    await client.wait_until_up(SERVER_CHECK_S)
            except (InferenceError, ValueError) as error:
                raise config.ConfigError(
                    f"endpoints.{endpoint.name}.url", str(endpoint.url), str(error)
                ) from error

    async def _attend(
        self, attendance: Attendance, bus: Bus, options: dict[str, object]
    ) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_end.set)
        health = Health()
        server = HealthServer(
            self._settings.health_port, health, attendance.status, host=self._settings.health_host
        )
        await server.start()
        exit_when_stuck(health)
        self._log.info("started", brokers=self._settings.brokers, health_port=server.port)
        try:
            tasks = {
                asyncio.create_task(self._follow(attendance)),
                asyncio.create_task(self._watch_broker(options)),
                asyncio.create_task(self._asked_to_end.wait()),
                asyncio.create_task(beat_event_loop(health, LOOP_STUCK_S)),
                asyncio.create_task(_report(health, attendance, bus, self._settings)),
            }
            # waits: for as long as the process serves
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            code = self._failed(done)
            if code == 0:
                drain = asyncio.create_task(attendance.drain())
                # Where the broker goes first, nothing of ours can be finished any more.
                # waits: the drain has a grace of its own
                done, pending = await asyncio.wait(
                    {drain, *pending}, return_when=asyncio.FIRST_COMPLETED
                )
                code = self._failed(done)
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=15)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._service.close(), 10)
        finally:
            await server.stop()
        self._log.info("ended", code=code)
        if code:
            # Clients of a lost broker may hang in their own clean-up: nothing is left to save.
            os._exit(code)
        return code

    def _failed(self, done: set[asyncio.Task[Any]]) -> int:
        """Say what went wrong with these; the exit code."""
        errors = [error for task in done if (error := task.exception()) is not None]
        for error in errors:
            print(f"rollstream run {self._name}: {error}", file=sys.stderr)
        return 1 if errors else 0

    async def _follow(self, attendance: Attendance) -> None:
        """Follow the runs; a lost reader starts again, the broker's watch decides when to end."""
        while True:
            try:
                await attendance.follow()
            except (Lost, KafkaError, TimeoutError) as error:
                self._log.warning("runs topic lost", error=str(error))
                await asyncio.sleep(1)

    async def _watch_broker(self, options: dict[str, object]) -> None:
        """End the process, loudly, once the broker has been out of reach for too long."""
        last_seen_s = time.monotonic()
        room = BrokerRoom(self._settings.broker_pid)
        while True:
            await asyncio.sleep(BROKER_CHECK_S)
            if room.gone():
                raise Lost(f"the broker {self._settings.brokers} has ended, its data with it")
            reason = await check(self._settings.brokers, dict(options), BROKER_CHECK_S * 2)
            if reason is None:
                last_seen_s = time.monotonic()
            elif time.monotonic() - last_seen_s > self._settings.broker_lost_s:
                raise Lost(f"the broker {self._settings.brokers} is lost: {reason}")

    async def _reach_broker(self, options: dict[str, object], wait_s: float) -> str | None:
        """None once the broker answers; else, after the startup wait, why it does not."""
        deadline_s = time.monotonic() + wait_s
        while True:
            reason = await check(self._settings.brokers, dict(options), 5.0)
            if reason is None or time.monotonic() >= deadline_s:
                return reason
            await asyncio.sleep(0.5)

    async def _ensure_runs_topic(self, bus: Bus) -> None:
        admin = bus.admin()
        await start(admin)
        try:
            await create(admin, [runs_spec(self._settings.prefix)])
        finally:
            await stop(admin)


async def _report(
    health: Health, attendance: Attendance, bus: Bus, settings: ServiceSettings
) -> None:
    """Keep readiness true: the runs are known, and each stage of a live run works or stands by.

    Raises Lost where the process had better end.
    """
    vigil = Vigil(attendance, settings)
    while True:
        health.set_ready("runs", attendance.caught_up, "reading the runs topic")
        silent = vigil.look()
        health.set_ready("progress", not silent, "; ".join(silent))
        if (group := bus.rejoins.too_often(time.monotonic())) is not None:
            raise Lost(
                f"client id = {bus.client_id}: {group} was joined more than five times a minute "
                "for minutes: end the other process of this id, or look at the broker"
            )
        retrying = [
            f"{c.run.run}/{c.route.instance}: {c.progress.last_error}"
            for c in attendance.contexts if c.progress.state in ("retrying", "blocked")
        ]
        health.set_ready("attendance", not retrying, "; ".join(retrying))
        await asyncio.sleep(0.5)
