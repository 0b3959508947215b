"""Whether a service is alive and ready, and the small HTTP server that says so.

Ready: every condition that it named is true. Alive: every activity that it watches gave a sign
of life within its limit. `now` is passed in, from one monotonic clock.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from rollstream.shared.config import ConfigError
from rollstream.shared.metrics import exposition

STUCK_EXIT_CODE = 70
"""Exit code of a process whose event loop is stuck (EX_SOFTWARE)."""
EVENT_LOOP = "event loop"
_BEAT_S = 1.0


class Health:
    """A plain state object; any code may write to it, the server and the watchdog read it."""

    def __init__(self) -> None:
        self._not_ready: dict[str, str] = {}
        self._named = False
        self._beats: dict[str, tuple[float, float]] = {}

    def set_ready(self, name: str, ready: bool, reason: str = "") -> None:
        """Say whether one condition holds (`broker`, `model`, `assignment`), and why not."""
        self._named = True
        if ready:
            self._not_ready.pop(name, None)
        else:
            self._not_ready[name] = reason or "not yet"

    def reasons(self) -> dict[str, str]:
        """Why it is not ready, by condition; empty when it is."""
        return dict(self._not_ready) if self._named else {"service": "starting"}

    def watch(self, name: str, limit_s: float, now: float) -> None:
        """From now on `name` must beat at least every `limit_s`; replaces an earlier watch."""
        self._beats[name] = (now, limit_s)

    def beat(self, name: str, now: float) -> None:
        """A sign of life. Without effect for a name that is not watched."""
        if name in self._beats:
            self._beats[name] = (now, self._beats[name][1])

    def unwatch(self, name: str) -> None:
        """It ended as it should."""
        self._beats.pop(name, None)

    def stuck(self, now: float) -> dict[str, float]:
        """Seconds since the last sign of life, for each that is over its limit."""
        return {
            name: now - last
            for name, (last, limit_s) in list(self._beats.items())
            if now - last > limit_s
        }


class HealthServer:
    """`/livez`, `/readyz`, `/metrics` and `/statusz` of one process.

    /livez    200, or 500 with what is stuck and for how many seconds
    /readyz   200, or 503 with the reasons
    /metrics  Prometheus text
    /statusz  JSON of what `status` returns
    """

    def __init__(
        self, port: int, health: Health, status: Callable[[], Any] = dict,
        *, host: str = "127.0.0.1", flag: str = "--health-port",
    ) -> None:
        self.port = port
        self.host = host
        self._health = health
        self._status = status
        self._flag = flag
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; `port` 0 becomes the one that was free.

        Raises ConfigError where the port is taken or not allowed.
        """
        app = web.Application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/statusz", self._statusz)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, self.port).start()
        except OSError as error:
            await runner.cleanup()
            why = "is in use" if error.errno == errno.EADDRINUSE else (error.strerror or "")
            raise ConfigError(
                self._flag, self.port,
                f"this port of {self.host} {why}: give another, or 0 for any free one",
            ) from error
        self.port = runner.addresses[0][1]
        self._runner = runner

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _livez(self, _: web.Request) -> web.Response:
        stuck = self._health.stuck(time.monotonic())
        return _json({"alive": not stuck, "stuck_s": stuck}, 500 if stuck else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        reasons = self._health.reasons()
        return _json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        text, content_type = exposition()
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def _statusz(self, _: web.Request) -> web.Response:
        return _json(self._status(), 200)


def _json(value: Any, status: int) -> web.Response:
    body = msgspec.json.encode(value, enc_hook=repr)
    return web.Response(body=body, status=status, content_type="application/json")


async def beat_event_loop(health: Health, limit_s: float) -> None:
    """Runs for ever: the event loop's own sign of life, to be watched by `exit_when_stuck`."""
    health.watch(EVENT_LOOP, limit_s, time.monotonic())
    try:
        while True:
            health.beat(EVENT_LOOP, time.monotonic())
            await asyncio.sleep(_BEAT_S)
    finally:
        health.unwatch(EVENT_LOOP)


def exit_when_stuck(health: Health, *, check_every_s: float = 1.0) -> None:
    """Start a thread that ends the process loudly once its event loop is stuck.

    A stuck loop can't answer `/livez`, nor end itself: the thread prints every thread's stack to
    stderr and exits with `STUCK_EXIT_CODE`. Other stuck activities are `/livez`'s business.
    """

    def watch() -> None:
        while True:
            time.sleep(check_every_s)
            silent_s = health.stuck(time.monotonic()).get(EVENT_LOOP)
            if silent_s is not None:
                print(f"event loop stuck for {silent_s:.0f} s, exiting", file=sys.stderr)
                faulthandler.dump_traceback(all_threads=True)
                sys.stderr.flush()
                os._exit(STUCK_EXIT_CODE)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()
