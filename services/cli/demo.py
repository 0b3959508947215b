"""rollstream demo: rl with a teacher, sft and eval on two-digit addition, on this machine.

Five services as separate processes, an embedded broker, and SmolLM2-135M on the CPU: real sampling,
real rubrics, no GPU and no network. Stopped with Ctrl-C, the next start goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import msgspec
from aiokafka.errors import KafkaError
from rich.console import Console

from rollstream.services.tap.watch import follow
from rollstream.shared import routes
from rollstream.shared.brokers.broker import free_port
from rollstream.shared.bus import Bus, Lost
from rollstream.shared.config import ConfigError, Parser
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.registry import read_registry
from rollstream.shared.runs import (
    BlobSettings,
    RunConfig,
    Sampling,
    SinkSettings,
    Status,
    Teacher,
)

from .books import READ_S, line
from .connect import open_bus
from .processes import CannotStart, Children
from .propose import Refused, known_runs, propose
from .run_settings import RunSettings, local_blobs, to_config
from .up import Stack, add_flags, run_stack

ENVIRONMENT = "two_digit_addition"
STARTUP_WAIT_S = 180.0
TEACHER_TOP_K = 8
TRAINER_CLIENT = Path(__file__).resolve().parents[2] / "examples" / "trainer_client.py"
DONE_MARK = "done"


def main(command: str, argv: list[str]) -> int:
    """Run the demo; 0 when all three runs ended with balanced books."""
    parser = Parser(
        prog="rollstream demo", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    for flag, default, help_text in (
        ("--rl-batches", 2, "batches of 32 samples"), ("--sft-groups", 8, "groups of 8 samples"),
        ("--eval-rows", 16, "rows, 4 samples each"),
    ):
        parser.add_argument(
            flag, type=_at_least_1, default=default, help=f"{help_text} [{default}]"
        )
    parser.set_defaults(engine=True)
    started_s = time.monotonic()

    async def work(given: argparse.Namespace, stack: Stack, children: Children) -> int:
        try:
            return await _runs(given, stack, children, started_s)
        except (Refused, Lost, KafkaError) as error:
            raise CannotStart(str(error)) from error

    return run_stack("demo", parser, argv, work)


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid count: '{text}' (give at least 1)")
    return int(text)


async def _runs(
    given: argparse.Namespace, stack: Stack, children: Children, started_s: float
) -> int:
    console = Console()
    folder, number, resumed = _folder(Path(given.folder))
    bus = await open_bus(stack.brokers)
    wanted = _configs(given, stack, folder, number)
    if resumed:
        console.print(f"going on with {folder}")
    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(_started(bus, config)) for config in wanted]
    except* (Refused, Lost, KafkaError, ConfigError) as errors:
        raise Refused(str(errors.exceptions[0])) from errors
    configs = [task.result() for task in asked]
    children.check()
    rl = configs[0]
    trainer = await _trainer(given, rl, folder)
    guard = asyncio.create_task(_guard(bus, rl, children, trainer, folder))
    followed = asyncio.create_task(follow(bus, list(configs), console))
    try:
        # waits: until the run is over, or whoever started it has enough
        await asyncio.wait({guard, followed}, return_when=asyncio.FIRST_COMPLETED)
        await (followed if followed.done() else guard)
    finally:
        guard.cancel()
        followed.cancel()
        await asyncio.wait({guard, followed}, timeout=10)
        if trainer.returncode is None:
            trainer.terminate()
            await asyncio.wait_for(trainer.wait(), 10)
    balanced = await _report(bus, list(configs), folder, console)
    (folder / DONE_MARK).write_text(time.strftime("%Y-%m-%dT%H:%M:%S\n"))
    console.print(f"\ndone in {time.monotonic() - started_s:.0f} s")
    return 0 if balanced else 1


async def _started(bus: Bus, config: RunConfig) -> RunConfig:
    """Start the run, or find it where a durable broker kept it."""
    known = (await known_runs(bus, config.prefix)).runs.get(config.run)
    if known is not None and known.config is not None:
        return known.config
    return await propose(bus, config, STARTUP_WAIT_S)


async def _guard(
    bus: Bus, rl: RunConfig, children: Children, trainer: asyncio.subprocess.Process, folder: Path
) -> None:
    """Ends, by CannotStart, where a service has given up or the trainer has left the rl run."""
    while True:
        children.check()
        if trainer.returncode:
            found = (await read_registry(bus, rl.prefix)).runs[rl.run]
            if found.status in (Status.RUNNING, Status.PAUSED):
                raise CannotStart(f"the trainer ended early, see {folder / 'trainer.log'}")
        await asyncio.sleep(1)


def _folder(root: Path) -> tuple[Path, int, bool]:
    """The demo's folder, its number, and whether it is one that was stopped before its end."""
    earlier = sorted(root.glob("demo-[0-9][0-9][0-9]"))
    number = int(earlier[-1].name[-3:]) if earlier else 0
    if earlier and not (earlier[-1] / DONE_MARK).exists():
        return earlier[-1], number, True
    folder = root / f"demo-{number + 1:03d}"
    folder.mkdir(parents=True)
    return folder, number + 1, False


def _configs(
    given: argparse.Namespace, stack: Stack, folder: Path, number: int
) -> list[RunConfig]:
    """The three runs: about 64 rl, 64 sft and 16 x 4 eval samples."""
    table = routes.load()
    common = RunSettings(
        env=ENVIRONMENT, endpoint="default", model=stack.model, partitions=stack.partitions,
        sampling=Sampling(max_tokens=14), group_size=8, include_messages=True,
        blobs=local_blobs(BlobSettings(), folder),
    )

    def config(pipeline: str, **fields: object) -> RunConfig:
        sink = SinkSettings(out=str(folder / pipeline), port=free_port())
        name = f"demo-{number:03d}-{pipeline}"
        settings = msgspec.structs.replace(common, run=name, sink=sink, **fields)
        return to_config(pipeline, settings, table)

    teacher = Teacher(endpoint="default", model=stack.model, top_k=TEACHER_TOP_K)
    return [
        config("rl", total_steps=given.rl_batches, batch_size=32, teacher=teacher),
        config("sft", total_groups=given.sft_groups, seed=1),
        config("eval", total_groups=given.eval_rows, group_size=4, seed=2),
    ]


async def _trainer(
    given: argparse.Namespace, rl: RunConfig, folder: Path
) -> asyncio.subprocess.Process:
    """The example trainer, a separate process that takes the batches over HTTP."""
    log = (folder / "trainer.log").open("wb")
    with log:
        return await asyncio.create_subprocess_exec(
            sys.executable, str(TRAINER_CLIENT), "--url", f"http://{rl.sink.host}:{rl.sink.port}",
            "--batches", str(given.rl_batches), "--batch-size", str(rl.batch_size),
            "--wait-s", "120", stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )


async def _report(
    bus: Bus, configs: list[RunConfig], folder: Path, console: Console
) -> bool:
    """Say how it ended, where everything lies, and which command looks at it."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    balanced = True
    console.rule("the books")
    for config in configs:
        for books in (await read_ledger(bus, config, READ_S)).books():
            balanced = balanced and books.balanced and books.in_flight == 0
            say(f"{config.pipeline:<5} {line(books)}")
    metrics = msgspec.json.decode((folder / "eval" / "metrics.json").read_bytes())
    results = metrics["results"]["all"]
    shown = "  ".join(
        f"{name} {results[name]:.3f} (+-{results[f'{name}_stderr']:.3f})"
        for name in results if name.startswith("pass@") and not name.endswith("_stderr")
    )
    say(f"eval  {shown}")
    console.rule("where it lies")
    for what, command in (
        ("rl batches, as the trainer took them", f"cat {folder}/trainer.log"),
        ("rl batches offered and acknowledged", f"cat {folder}/rl/batches.jsonl"),
        ("sft dataset, one group a line", f"head -c 600 {folder}/sft/dataset.jsonl"),
        ("sft dataset as parquet", f"ls -l {folder}/sft/dataset.parquet"),
        ("eval report", f"python3 -m json.tool {folder}/eval/metrics.json"),
        ("eval samples", f"head -n 2 {folder}/eval/samples.jsonl"),
        ("logs of the services", f"ls {folder.parent / 'logs'}"),
    ):
        say(f"  {what:<38} {command}")
    return balanced
