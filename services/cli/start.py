"""rollstream rl|sft|eval: start a run on services that are running, and watch it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
from aiokafka.errors import KafkaError
from rich.console import Console

from rollstream.services.tap.watch import follow
from rollstream.shared import routes
from rollstream.shared.bus import Bus, Lost
from rollstream.shared.config import (
    ConfigError,
    Parser,
    add_flags,
    parse_flags,
    printable,
    read_file,
)
from rollstream.shared.runs import RunConfig
from rollstream.shared.topics import TopicError

from .books import summary
from .connect import find_brokers, open_bus, run_async, running_up
from .propose import Refused, propose
from .run_settings import RunSettings, load_run_settings, local_blobs, to_config


def main(command: str, argv: list[str]) -> int:
    """Start a run of the pipeline that the command names; its exit code."""
    if command == "start":
        if not argv or argv[0].startswith("-"):
            usage = "rollstream start PIPELINE --config FILE ...   (a pipeline of its routes)"
            if argv and argv[0] in ("-h", "--help"):
                print(f"usage: {usage}")
                return 0
            print(f"rollstream start: PIPELINE = (not given): {usage}", file=sys.stderr)
            return 2
        command, argv = argv[0], argv[1:]
    parser = Parser(
        prog=f"rollstream {command}",
        description=f"Start a run of the {command} pipeline. Flags win over variables "
        "(ROLLSTREAM_...), variables over the [run] table of the file.",
    )
    parser.add_argument("--config", help="a TOML file with a [run] table and [[route]] rows")
    parser.add_argument("--detach", action="store_true", help="start it and return")
    parser.add_argument("--print-config", action="store_true", help="show the run, and end")
    add_flags(parser, RunSettings)
    try:
        given = parse_flags(parser, argv)
        table = read_file(given["config"])
        settings = load_run_settings(command, table, given, os.environ)
        up = running_up()
        if up is not None and settings.brokers in ("", up.brokers):
            settings = msgspec.structs.replace(
                settings, partitions=settings.partitions or up.partitions,
                model=settings.model or up.model, blobs=local_blobs(settings.blobs, Path("runs")),
            )
        config = to_config(command, settings, routes.load(table.get("route", ())))
        if given["print_config"]:
            print(printable(settings))
            return 0
        bus, final = run_async(lambda: _start(settings, config))
    except (ConfigError, Refused, TopicError, Lost, KafkaError) as error:
        print(f"rollstream {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"rollstream {command}: ended before the run was started", file=sys.stderr)
        return 130
    try:
        return 0 if given["detach"] else run_async(lambda: _watch(bus, final))
    except (Lost, KafkaError) as error:
        print(f"rollstream {command}: stopped watching: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped watching; the run goes on (`rollstream runs stop {final.run}` ends it)")
        return 0


async def _start(settings: RunSettings, config: RunConfig) -> tuple[Bus, RunConfig]:
    bus = await open_bus(find_brokers(settings.brokers), settings.security)
    final = await propose(bus, config, settings.startup_wait_s)
    print(f"run {final.run} started; results in {final.sink.out}", flush=True)
    if final.pipeline == "rl":
        print(f"trainer API: http://{final.sink.host}:{final.sink.port}", flush=True)
    return bus, final


async def _watch(bus: Bus, final: RunConfig) -> int:
    console = Console()
    await follow(bus, [final], console)
    console.print(await summary(bus, final), highlight=False, markup=False, soft_wrap=True)
    return 0
