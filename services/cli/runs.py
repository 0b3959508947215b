"""rollstream runs list|show|pause|resume|stop|rm: what runs there are, and what becomes of them."""

from __future__ import annotations

import sys

import msgspec
from aiokafka.errors import KafkaError

from rollstream.shared.blobs import StoreUnreachable
from rollstream.shared.bus import Bus, Lost, start, stop
from rollstream.shared.config import ConfigError, Parser, parse_flags
from rollstream.shared.registry import set_status
from rollstream.shared.runs import Run, Status, config_key, state_key
from rollstream.shared.topics import TopicError, delete, runs_topic

from .blobs import remove_all
from .connect import Reach, add_reach_flags, find_brokers, load_reach, open_bus, run_async
from .propose import known_runs

ACTIONS: dict[str, Status] = {
    "pause": Status.PAUSED, "resume": Status.RUNNING, "stop": Status.STOPPED,
}


def main(command: str, argv: list[str]) -> int:
    """Do it; 0 done, 2 not possible."""
    parser = Parser(prog="rollstream runs", description=__doc__)
    parser.add_argument("action", choices=["list", "show", *ACTIONS, "rm"])
    parser.add_argument("RUN", nargs="?")
    add_reach_flags(parser)

    async def work(action: str, name: str | None, reach: Reach) -> int:
        bus = await open_bus(find_brokers(reach.brokers), reach.security)
        runs = (await known_runs(bus, reach.prefix)).runs
        if action == "list":
            print("\n".join(_line(run) for run in runs.values()) or "no runs")
            return 0
        if name not in runs:
            known = ", ".join(runs) or "none"
            raise ConfigError("RUN", name or "(not given)", f"no such run (there are: {known})")
        await _act(bus, reach.prefix, runs[name], action)
        return 0

    try:
        given = parse_flags(parser, argv)
        reach = load_reach(given)
        return run_async(lambda: work(given["action"], given["RUN"], reach))
    except (ConfigError, Lost, KafkaError, TopicError, StoreUnreachable) as error:
        print(f"rollstream runs: {error}", file=sys.stderr)
        return 2


def _line(run: Run) -> str:
    pipeline = run.config.pipeline if run.config else "?"
    out = run.config.sink.out if run.config else ""
    reason = f" ({run.state.reason})" if run.state and run.state.reason else ""
    return f"{run.id:<24} {pipeline:<6} {run.status or '?'}{reason}  {out}"


async def _act(bus: Bus, prefix: str, run: Run, action: str) -> None:
    live = run.status is not None and run.status.live
    if action == "show":
        print(msgspec.json.format(msgspec.json.encode(run), indent=2).decode())
    elif action == "rm":
        if live:
            raise ConfigError("RUN", run.id, f"it is {run.status}: stop it first")
        await _remove(bus, prefix, run)
        print(f"{run.id}: removed, its topics too")
    elif run.status not in (Status.RUNNING, Status.PAUSED):
        raise ConfigError("RUN", run.id, f"it is {run.status} and can't {action}")
    else:
        await set_status(bus, prefix, run.id, ACTIONS[action], f"by `rollstream runs {action}`")
        print(f"{run.id}: {ACTIONS[action]}")


async def _remove(bus: Bus, prefix: str, run: Run) -> None:
    writer = await bus.writer()
    admin = bus.admin()
    await start(admin)
    try:
        if run.config is not None:
            # First: where it fails, or is killed, the run is still there to be removed again.
            await remove_all(run.config)
        for key in (state_key(run.id), config_key(run.id)):
            await writer.send_bytes(runs_topic(prefix), 0, key, None)
        await delete(admin, prefix, run.id)
    finally:
        await stop(admin)
        await writer.close()
