"""`rollstream up` and `demo` as a user has them: what starts together ends together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.services.cli.up import SERVICES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROGRAM = [sys.executable, "-m", "rollstream.services.cli"]
MARK = "ROLLSTREAM_TEST_UID"
"""In the environment of everything that a test's program starts; a name that it lets pass."""
GONE_S = 15.0
RUN = ["sft", "--env", "two_digit_addition", "--sampling.max-tokens", "8", "--group-size", "4"]


class Terminal:
    """A folder to start the program in, and all processes that come of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._environment = {**os.environ, MARK: self.mark}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """The program in the background, its output in `out`."""
        with (self.folder / "out").open("wb") as out:
            process = subprocess.Popen(
                [*PROGRAM, *arguments], cwd=self.folder, env=self._environment, stdout=out,
                stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
            )
        self._started.append(process)
        return process

    def run(self, *arguments: str) -> str:
        """The program to its end, which must be 0; what it printed."""
        done = subprocess.run(
            [*PROGRAM, *arguments], cwd=self.folder, env=self._environment, check=False,
            timeout=200, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )
        assert done.returncode == 0, done.stderr + self.out()
        return done.stdout

    def up(self, *flags: str, delay_s: float = 0.0) -> subprocess.Popen[bytes]:
        """`rollstream up` with the scripted engine, once it is ready."""
        answer = {"text": "1 + 1 = 2", "delay_s": delay_s}
        (self.folder / "script.jsonl").write_text(json.dumps(answer))
        process = self.start(
            "up", "--engine", "--engine-flags", "--script script.jsonl", *flags
        )
        self.until(lambda: "\nready" in self.out(), process=process)
        return process

    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    def until(
        self, there: Callable[[], Any], timeout_s: float = 120.0,
        process: subprocess.Popen[bytes] | None = None,
    ) -> Any:
        """What `there` tells once it is true."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := there()):
            assert process is None or process.poll() is None, self.out()
            assert time.monotonic() < deadline_s, self.out()
            time.sleep(0.1)
        return found

    def living(self) -> dict[int, str]:
        """Our processes by pid; by the mark, as a lost child's parent is another."""
        found = {}
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get(MARK) == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found[process.pid] = " ".join(process.cmdline())
            except psutil.Error:
                continue
        return found

    def gone(self, process: subprocess.Popen[bytes]) -> None:
        """Nothing of ours lives any more, soon."""
        deadline_s = time.monotonic() + GONE_S
        while process.poll() is None or (left := self.living()):
            assert time.monotonic() < deadline_s, self.living() or self.out()
            time.sleep(0.1)
        assert left == {}

    def lines(self, path: str) -> list[dict[str, Any]]:
        """A JSONL file's whole lines so far."""
        file = self.folder / path
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def delivered(self, run: str) -> list[int]:
        """Numbers of the groups that have been delivered, by the parts of all the run's logs."""
        parts = (self.folder / run / "parts").glob("*/*/*.jsonl")
        lines = [line for path in parts for line in self.lines(str(path))]
        return sorted(line["n"] for line in lines if line.get("outcome") == "delivered")

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait(10)
        for pid in self.living():
            psutil.Process(pid).kill()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    yield made
    made.end()


def test_up_serves_other_commands_of_its_folder_and_restarts_what_dies(terminal: Terminal):
    up = terminal.up()
    names = " ".join(terminal.living().values())
    for part in (*SERVICES, "tansu", "rollstream.services.engine"):
        assert part in names
    said = terminal.run(*RUN, "--run", "one", "--total-groups", "2")
    assert "one: dataset: issued 2 = delivered 2 + dropped 0 + parked 0 + in flight 0" in said
    assert "[balanced]" in said
    assert len(terminal.lines("runs/one/dataset.jsonl")) == 2

    [victim] = [p for p, command in terminal.living().items() if "cli run generator" in command]
    os.kill(victim, signal.SIGKILL)
    again = terminal.until(lambda: [
        p for p, command in terminal.living().items()
        if "cli run generator" in command and p != victim
    ])
    assert len(again) == 1
    said = terminal.run(*RUN, "--run", "two", "--total-groups", "2")
    assert "two: dataset: issued 2 = delivered 2" in said
    assert terminal.run("runs", "list").count("done") == 2
    assert "[balanced]" in terminal.run("ledger", "one")
    up.send_signal(signal.SIGINT)
    terminal.gone(up)
    assert up.returncode == 130
    assert "ended, nothing is left running" in terminal.out()
    assert not (terminal.folder / "runs" / "up.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_up(terminal: Terminal, number: signal.Signals):
    """In the middle of a run: requests are out, and groups are open."""
    up = terminal.up(delay_s=1.5)
    terminal.run(*RUN, "--run", "cut", "--total-groups", "500", "--detach")
    terminal.until(lambda: list((terminal.folder / "runs" / "cut").glob("**/*")))
    time.sleep(2)
    up.send_signal(number)
    terminal.gone(up)
    # The folder is free again, whatever ended it.
    up = terminal.up()
    up.send_signal(signal.SIGTERM)
    terminal.gone(up)


def test_up_that_is_ended_while_it_starts_leaves_nothing(terminal: Terminal):
    up = terminal.start("up", "--engine")
    terminal.until(lambda: "broker: embedded at" in terminal.out(), process=up)
    up.send_signal(signal.SIGINT)
    terminal.gone(up)
    assert up.returncode == 130


@pytest.mark.kafka
def test_a_run_goes_on_where_kafka_kept_it(terminal: Terminal):
    if not os.environ.get("KAFKA_HOME"):
        pytest.skip("KAFKA_HOME is not set")
    groups = 30
    up = terminal.up("--broker", "kafka", delay_s=0.4)
    assert terminal.run("runs", "list", "--prefix", "nobody") == "no runs\n"
    terminal.run(*RUN, "--run", "durable", "--total-groups", str(groups), "--detach",
                 "--max-in-flight", "16")
    terminal.until(lambda: len(terminal.delivered("runs/durable")) >= 3, process=up)
    assert len(terminal.delivered("runs/durable")) < groups
    up.send_signal(signal.SIGINT)
    terminal.gone(up)
    up = terminal.up("--broker", "kafka")
    terminal.until(lambda: "done" in terminal.run("runs", "list"), process=up)
    books = terminal.run("ledger", "durable")
    assert f"issued {groups} = delivered {groups} + dropped 0" in books
    assert "[balanced]" in books
    assert terminal.delivered("runs/durable") == list(range(groups))
    assert len(terminal.lines("runs/durable/dataset.jsonl")) == groups
    up.send_signal(signal.SIGINT)
    terminal.gone(up)


def test_a_demo_that_was_stopped_goes_on(terminal: Terminal):
    """The real model, and sizes that a busy machine does in a minute."""
    sizes = ["--rl-batches", "1", "--sft-groups", "2", "--eval-rows", "2"]
    demo = terminal.start("demo", *sizes)
    terminal.until(
        lambda: terminal.delivered("runs/demo-001/sft") + terminal.delivered("runs/demo-001/eval"),
        200, process=demo,
    )
    demo.send_signal(signal.SIGINT)
    terminal.gone(demo)
    assert demo.returncode == 130

    again = terminal.start("demo", *sizes)
    assert again.wait(300) == 0, terminal.out()
    terminal.gone(again)
    said = terminal.out()
    assert "going on with runs/demo-001" in said
    assert said.count("[balanced]") == 3
    assert "DOES NOT BALANCE" not in said
    for run, lines in (("sft", "dataset.jsonl"), ("eval", "samples.jsonl")):
        assert terminal.delivered(f"runs/demo-001/{run}") == [0, 1]
        samples = 1 if run == "sft" else 4
        assert len(terminal.lines(f"runs/demo-001/{run}/{lines}")) == 2 * samples
