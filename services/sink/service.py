"""The sink service: at the end of each routing, one of three leaves by the instance's name.

`sink:trainer` hands batches to a trainer, `sink:report` writes an evaluation's report, and
`sink:dataset`, `sink:archive` or any `sink:dataset-...` write dataset files.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
from pathlib import Path
from typing import Any, Literal

import aiohttp
import structlog
from aiohttp import web

from rollstream.services.sink import batch_file
from rollstream.services.sink.dataset import FORMATS, write_dataset
from rollstream.services.sink.files import FileLeaf
from rollstream.services.sink.parts import Folder, PartError
from rollstream.services.sink.report import write_report
from rollstream.services.sink.trainer import TrainerLeaf
from rollstream.services.sink.trainer_api import SHUTDOWN_S, TrainerApi
from rollstream.shared.bus import Lost
from rollstream.shared.role import Active, run_active
from rollstream.shared.routes import Route
from rollstream.shared.runs import Refusal, RunConfig, SinkSettings, Status
from rollstream.shared.service import RunContext
from rollstream.shared.topics import data_topic

FAREWELL_S = 5.0
LeafKind = Literal["trainer", "dataset", "report"]

log = structlog.get_logger("rollstream.sink")


def kind_of(leaf: str | None) -> LeafKind:
    """Which kind of leaf an instance's name asks for. Raises Refusal for an unknown one."""
    if leaf in ("trainer", "report"):
        return leaf  # type: ignore[return-value]
    if leaf is not None and (leaf in ("dataset", "archive") or leaf.startswith("dataset-")):
        return "dataset"
    raise Refusal("sink", leaf, "name it sink:trainer, sink:report, sink:dataset, "
                  "sink:archive or sink:dataset-NAME")


class Sink:
    """Ends the groups of every run of its process, each at the run's leaves."""

    name = "sink"
    consumes = frozenset({"Scored", "Distilled"})
    produces = None

    def __init__(self, settings: Any = None) -> None:
        self._settings = settings

    async def consider(self, run: RunConfig, route: Route) -> dict[str, Any]:
        """Whether the run's results have a place to go, and which groups are there already.

        `restored`: ranges [first, last] of groups that ended here in earlier logs of the run.
        Raises Refusal.
        """
        kind = kind_of(route.leaf)
        if kind == "trainer":
            _check_batches(run)
            await _check_port(run)
        elif not run.sink.out:
            raise Refusal("sink.out", run.sink.out, "give a folder for the run's files")
        if run.sink.out:
            await asyncio.to_thread(_check_folder, Path(run.sink.out))
        if kind == "dataset":
            _check_formats(run.sink)
        restored = await asyncio.to_thread(_restored, run, route, kind)
        return {"leaf": route.leaf, "kind": kind, "restored": ranges(restored)}

    async def attend(self, context: RunContext) -> None:
        """End the run's groups at this leaf until it is done. Raises Lost and PartError."""
        match kind_of(context.route.leaf):
            case "trainer":
                await run_active(context, lambda active: _serve_trainer(context, active))
            case "report":
                await run_active(context, _report(context).alone)
            case "dataset":
                await _dataset(context).share()

    async def close(self) -> None:
        """Nothing outlives a run."""


def _restored(run: RunConfig, route: Route, kind: LeafKind) -> list[int]:
    """The groups that ended here in earlier logs."""
    out = Path(run.sink.out)
    try:
        if kind != "trainer":
            return sorted(_folder(run, route).restored())
        if not run.sink.out:
            return []
        lines = batch_file.read(out / "batches.jsonl")
        return sorted({end.n for end in batch_file.delivered_before(lines, run.log_id)})
    except PartError as error:
        raise Refusal("sink.out", str(out), f"repair or choose another folder: {error}") from error


def ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Sorted numbers as the ranges [first, last] that they fill."""
    found: list[tuple[int, int]] = []
    for n in numbers:
        if found and found[-1][1] == n - 1:
            found[-1] = (found[-1][0], n)
        else:
            found.append((n, n))
    return found


def _dataset(context: RunContext) -> FileLeaf:
    run, out = context.run, Path(context.run.sink.out)
    return FileLeaf(
        context, _folder(run, context.route), lambda parts: write_dataset(parts, out, run),
        min_score=run.sink.min_score,
    )


def _report(context: RunContext) -> FileLeaf:
    run, out = context.run, Path(context.run.sink.out)
    folder = _folder(run, context.route, keep_dropped=True)
    return FileLeaf(context, folder, lambda parts: write_report(parts, out, run))


def _folder(run: RunConfig, route: Route, *, keep_dropped: bool = False) -> Folder:
    assert route.leaf is not None
    assert route.input is not None
    topic = data_topic(run.prefix, run.run, run.pipeline, route.input)
    return Folder(
        Path(run.sink.out), route.leaf, topic=topic, log_id=run.log_id, keep_dropped=keep_dropped
    )


async def _serve_trainer(context: RunContext, active: Active) -> None:
    """The active trainer leaf with its API, until the run ends or the role is lost."""
    leaf = TrainerLeaf(context, active)
    api = TrainerApi(leaf)
    runner = web.AppRunner(api.app(), access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()

    async def serve() -> None:
        host, port = context.run.sink.host, context.run.sink.port
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise Lost(f"sink.port = {port}: the trainer API can't listen there ({error})"
                       ) from error
        log.info("trainer API", run=context.run.run, url=api_url(runner))

    try:
        await leaf.work(serve)
        if context.status is Status.DONE:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(api.told_done.wait(), FAREWELL_S)
    finally:
        await runner.cleanup()


def api_url(runner: web.AppRunner) -> str:
    host, port, *_ = runner.addresses[0]
    return f"http://{host}:{port}"


def _check_batches(run: RunConfig) -> None:
    if run.batch_size % run.group_size:
        raise Refusal("batch_size", run.batch_size,
                      f"use a multiple of group_size {run.group_size}: a group is never split")


async def _check_port(run: RunConfig) -> None:
    """The port is free, or this run's own API has it: then we stand by."""
    host, port = run.sink.host, run.sink.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            return
        except OSError as error:
            reason = error
    if await _serves(run):
        return
    raise Refusal("sink.port", port, f"use another port for the trainer API ({reason.strerror})")


async def _serves(run: RunConfig) -> bool:
    timeout = aiohttp.ClientTimeout(total=2)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(
            f"http://{run.sink.host}:{run.sink.port}/"
        ) as response:
            return (await response.json()).get("run") == run.run
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError):
        return False


def _check_folder(out: Path) -> None:
    """It can be written to, or made: a run that another stage refuses leaves no folder behind."""
    there = next(folder for folder in (out, *out.parents) if folder.exists())
    try:
        if there != out and os.access(there, os.W_OK | os.X_OK) and there.is_dir():
            return
        probe = there / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise Refusal("sink.out", str(out), f"give a folder that can be written to ({error})"
                      ) from error


def _check_formats(settings: SinkSettings) -> None:
    for format in settings.formats:
        if format not in FORMATS:
            raise Refusal("sink.formats", format, f"use any of: {', '.join(FORMATS)}")
    if "parquet" in settings.formats and importlib.util.find_spec("pyarrow") is None:
        raise Refusal("sink.formats", "parquet", "pip install rollstream[export], or leave it out")
