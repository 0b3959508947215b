"""Bad input to the real program: exit code 2, one line that names field and fix, nothing left.

One `rollstream up` over the embedded broker and the scripted engine serves the whole file.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from rollstream.shared.service import installed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PROGRAM = [sys.executable, "-m", "rollstream.services.cli"]
ENV = ["--env", "two_digit_addition", "--startup-wait-s", "40"]
AT_ONCE = 3


class TextServer(BaseHTTPRequestHandler):
    """An OpenAI-compatible API that gives text and nothing else."""

    def do_GET(self) -> None:
        self._say(200 if self.path == "/v1/models" else 404, {"data": [{"id": "text-only"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "hi"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._say(200 if self.path.endswith("/chat/completions") else 404, {"choices": [choice]})

    def _say(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@dataclass
class Place:
    """A folder in which `rollstream up` runs, and what bad input needs."""

    folder: Path
    brokers: str
    taken_port: int
    closed_port: int
    silent_port: int

    def fill(self, text: str) -> str:
        """The text with this place's ports and broker put in."""
        for name in ("brokers", "taken_port", "closed_port", "silent_port"):
            text = text.replace("{" + name + "}", str(getattr(self, name)))
        return text

    def run(
        self, *arguments: str, variables: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the program here to its end."""
        environment = {k: v for k, v in os.environ.items() if k != "KAFKA_HOME"}
        values = {k: self.fill(v) for k, v in (variables or {}).items()}
        return subprocess.run(
            [*PROGRAM, *map(self.fill, arguments)], cwd=self.folder, check=False, timeout=120,
            env={**environment, **values}, stdin=subprocess.DEVNULL,
            capture_output=True, encoding="utf-8", errors="replace",
        )

    def topics(self) -> list[str]:
        async def ask() -> list[str]:
            admin = AIOKafkaAdminClient(bootstrap_servers=self.brokers)
            await admin.start()
            try:
                return sorted(topic["topic"] for topic in await admin.describe_topics())
            finally:
                await admin.close()

        return asyncio.run(ask())


FILES = {
    "common.toml": """
startup_wait_s = 8
[endpoints.down]
url = "http://127.0.0.1:{closed_port}"
[endpoints.silent]
url = "http://127.0.0.1:{silent_port}"
[endpoints.text]
url = "http://127.0.0.1:{taken_port}/v1"
""",
    "script.jsonl": '{"text": "1 + 1 = 2"}\n',
    "empty.jsonl": "\n",
    "no_column.jsonl": '{"q": "1 + 1"}\n',
    "bad_line.jsonl": '{"question": "1 + 1"}\n[1]\n',
    "bad_messages.jsonl": '{"messages": ["hi"]}\n',
    "plain_file": "not a folder\n",
    "unknown_table.toml": '[rnu]\nenv = "two_digit_addition"\n',
    "broken_env.py": "import no_such_module_anywhere\n",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("refusals")
    text = ThreadingHTTPServer(("127.0.0.1", 0), TextServer)
    Thread(target=text.serve_forever, daemon=True).start()
    silent = socket.create_server(("127.0.0.1", 0))
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))  # bound, never listening: refused, and nobody else's
    place = Place(folder, "", text.server_port, closed.getsockname()[1], silent.getsockname()[1])
    for name, content in FILES.items():
        (folder / name).write_text(place.fill(content))
    command = [*PROGRAM, "up", "--config", "common.toml", "--engine",
               "--engine-flags", "--script script.jsonl"]
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(folder)}, start_new_session=True,
        )
    try:
        deadline_s = time.monotonic() + 120
        while not (folder / "runs" / "up.json").exists():
            assert up.poll() is None, (folder / "up.log").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        place.brokers = json.loads((folder / "runs" / "up.json").read_text())["brokers"]
        yield place
        assert up.poll() is None, "`rollstream up` itself ended"
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(40)
        text.shutdown()
        silent.close()
        closed.close()


@dataclass
class Case:
    """Arguments, and what the line on stderr must say."""

    arguments: list[str]
    words: list[str]
    lines: int = 1
    """More where several stages refuse: then at most one each."""


RUNS: dict[str, Case] = {
    "unknown-env": Case(["sft", "--env", "two_digit_additon"],
                        ["env = two_digit_additon", "did you mean 'two_digit_addition'?"], lines=3),
    "broken-env": Case(["sft", "--env", "broken_env"],
                       ["env = broken_env", "no_such_module_anywhere", "install"], lines=3),
    "env-args": Case(["sft", *ENV, "--env-args", '{"sede": 1}'],
                     ["env = two_digit_addition", "'sede'", "seed: int = 0"], lines=3),
    "empty-dataset": Case(["sft", "--dataset", "empty.jsonl"],
                          ["dataset = ", "empty.jsonl: it is empty"]),
    "no-column": Case(["sft", "--dataset", "no_column.jsonl"],
                      ["row 0 has columns q", "messages, prompt, question"]),
    "bad-line": Case(["sft", "--dataset", "bad_line.jsonl"], ["line 2 is no JSON object"]),
    "bad-messages": Case(["sft", "--dataset", "bad_messages.jsonl"], ["row 0: messages must be"]),
    "no-file": Case(["sft", "--dataset", "absent.jsonl"], ["absent.jsonl", "readable file"]),
    "server-down": Case(["sft", *ENV, "--endpoint", "down"],
                        ["endpoint = down: start the server", "{closed_port}"]),
    "server-silent": Case(["sft", *ENV, "--endpoint", "silent"],
                          ["endpoint = silent: start the server", "{silent_port}"]),
    "no-token-ids": Case(["rl", *ENV, "--endpoint", "text", "--model", "text-only",
                          "--sink.port", "0"],
                         ["endpoint = text: rl needs token ids", "use vLLM"]),
    "endpoint": Case(["sft", *ENV, "--endpoint", "defualt"],
                     ["endpoint = defualt: add [endpoints.defualt]", "known: default, down"]),
    "model": Case(["sft", *ENV, "--model", "smollm"],
                  ["model = smollm: the server has: smollm2-135m"]),
    "teacher-model": Case(["rl", *ENV, "--sink.port", "0", "--teacher.endpoint", "default",
                           "--teacher.model", "big"], ["teacher.model = big: it has: smollm2"]),
    "teacher-down": Case(["rl", *ENV, "--sink.port", "0", "--teacher.endpoint", "down",
                          "--teacher.model", "big"], ["teacher.endpoint = down: start the server"]),
    "port": Case(["rl", *ENV, "--sink.port", "{taken_port}"],
                 ["sink.port = {taken_port}: use another port"]),
    "out": Case(["sft", *ENV, "--sink.out", "plain_file/below"],
                ["sink.out = ", "plain_file/below: give a folder that can be written to"]),
    "formats": Case(["sft", *ENV, "--sink.formats", "csv"],
                    ["sink.formats = csv: use any of: jsonl, parquet"]),
    "advantage": Case(["sft", *ENV, "--advantage", "meen"],
                      ["advantage = meen: use mean, std, rloo"]),
}
"""What a stage refuses; the name is the run's."""

NO_MODEL = ["sft", "--env", "x", "--model", "m"]
INPUT: list[Case] = [
    Case(["run", "nosuch"], ["service = nosuch: use one of: generator"]),
    Case(["sft", *ENV, "--group-size", "0"], ["--group-size = 0: expected `int` >= 1"]),
    Case(["start", "rll", *ENV], ["pipeline = rll: use one of: rl, sft, eval"]),
    Case([*NO_MODEL, "--brokers", "127.0.0.1:{taken_port}"],
         ["--brokers = 127.0.0.1:{taken_port}", "no answer within 5 s"]),
    Case([*NO_MODEL, "--brokers", "127.0.0.1:{closed_port}"], ["no connection (refused)"]),
    Case([*NO_MODEL, "--brokers", "localhost"], ["write host:port"]),
    Case(["runs", "show", "nosuch"], ["RUN = nosuch: no such run"]),
    Case(["runs", "stop"], ["RUN = (not given): no such run"]),
    Case(["ledger", "nosuch"], ["RUN = nosuch: no such run"]),
    Case(["up"], ["folder = ", "runs here already"]),
    Case(["demo"], ["folder = ", "runs here already"]),
    *(Case(["run", "scorer", "--brokers", *flags], words) for flags, words in (
        (["127.0.0.1:{closed_port}", "--startup-wait-s", "1"],
         ["--brokers = 127.0.0.1:{closed_port}", "no connection (refused)"]),
        (["{brokers}", "--health-port", "{taken_port}"],
         ["--health-port = {taken_port}: this port of 127.0.0.1 is in use"]),
        (["{brokers}", "--prefix", "a.b"], ["prefix = a.b: use 1 to 63 of"]),
    )),
]
"""What a command refuses by itself, once it has looked; the rest: tests/unit/test_cli_input.py."""


@pytest.fixture(scope="module")
def outcomes(place: Place) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """All cases, a few at once: waiting for stages takes most of their time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {
            name: pool.submit(place.run, *case.arguments, "--run", name)
            for name, case in RUNS.items()
        }
        for number, case in enumerate(INPUT):
            found[str(number)] = pool.submit(place.run, *case.arguments)
        yield found


def refused(place: Place, case: Case, done: subprocess.CompletedProcess[str]) -> None:
    """Exit code 2, the words in the one line, and no secret."""
    said = done.stderr
    assert done.returncode == 2, said
    assert 1 <= len(said.splitlines()) <= case.lines, said
    assert said.startswith("rollstream"), said
    for words in map(place.fill, case.words):
        assert words in said, said


@pytest.mark.parametrize("name", RUNS)
def test_a_stage_refuses_a_run(place: Place, outcomes, name: str):
    refused(place, RUNS[name], outcomes[name].result())


@pytest.mark.parametrize("number", range(len(INPUT)), ids=lambda n: " ".join(INPUT[n].arguments))
def test_the_command_line_refuses(place: Place, outcomes, number: int):
    refused(place, INPUT[number], outcomes[str(number)].result())


def test_a_run_whose_name_is_taken_is_refused_and_stays(place: Place):
    first = place.run("sft", *ENV, "--run", "taken", "--total-groups", "1")
    assert first.returncode == 0, first.stderr
    assert "issued 1 = delivered 1" in first.stdout
    kept = [topic for topic in place.topics() if topic.startswith("rollstream.taken.")]
    again = place.run("sft", *ENV, "--run", "taken")
    refused(place, Case([], ["--run = taken: it exists already and is done", "runs rm taken"]),
            again)
    assert [t for t in place.topics() if t.startswith("rollstream.taken.")] == kept != []
    for action in ("pause", "resume", "stop"):
        refused(place, Case([], [f"RUN = taken: it is done and can't {action}"]),
                place.run("runs", action, "taken"))
    assert place.run("runs", "rm", "taken").returncode == 0
    assert not [topic for topic in place.topics() if topic.startswith("rollstream.taken.")]


def test_a_command_that_is_ended_while_it_waits_takes_its_topics_along(place: Place):
    command = [*PROGRAM, "sft", *ENV, "--run", "ended", "--endpoint", "silent"]
    process = subprocess.Popen(command, cwd=place.folder, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 30
    while "rollstream.ended.control" not in place.topics():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.splitlines() == ["rollstream sft: ended before the run was started"]


def test_nothing_of_refused_runs_is_left(place: Place, outcomes):
    """Last in the file: late answers have had their time to make a topic again."""
    for outcome in outcomes.values():
        outcome.result()
    time.sleep(2)
    assert [topic for topic in place.topics() if topic != "rollstream.runs"] == []
    assert place.run("runs", "list").stdout == "no runs\n"
    folders = {path.name for path in (place.folder / "runs").iterdir() if path.is_dir()}
    assert folders <= {"logs", "taken"}


@pytest.mark.parametrize("arguments", [
    ["up", "--folder", "plain_file"], ["up", "--broker", "kafka"],
    ["up", "--broker", "embedded", "--brokers", "localhost:1"],
    ["up", "--brokers", "127.0.0.1:{taken_port}"], ["up", "--config", "unknown_table.toml"],
    ["up", "--service-flags=--max-in-flight=0"], ["up", "--engine", "--model", "absent.gguf"],
    ["demo", "--engine-flags=--threads=0"],
], ids=" ".join)
def test_up_refuses_and_leaves_no_process(place: Place, arguments: list[str], tmp_path: Path):
    elsewhere = Place(tmp_path, "", place.taken_port, place.closed_port, place.silent_port)
    for name in ("plain_file", "unknown_table.toml"):
        (tmp_path / name).write_text(FILES[name])
    wrong_home = {"KAFKA_HOME": str(tmp_path)} if "kafka" in arguments else {}
    done = elsewhere.run(*arguments, variables=wrong_home)
    words = {
        "plain_file": "--folder = plain_file: give one that can be written to",
        "kafka": "KAFKA_HOME = ", "localhost:1": "--broker = embedded: leave it out",
        "127.0.0.1:{taken_port}": "no answer within 5 s", "unknown_table.toml": "rnu = ?",
        "--service-flags=--max-in-flight=0": "--max-in-flight = 0: expected `int` >= 1",
        "absent.gguf": "absent.gguf", "--engine-flags=--threads=0": "--threads 0",
    }[arguments[-1]]
    refused(elsewhere, Case(arguments, [words]), done)
    assert not (tmp_path / "runs" / "up.json").exists()
    assert processes_in(tmp_path) == []


def processes_in(folder: Path) -> list[str]:
    """Command lines of processes that work in this folder."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("flags", [
    ["run", "scorer", "--brokers", "{brokers}"],
    ["run", "sink", "--brokers", "{brokers}"],
    ["run", "prompt-producer", "--brokers", "{brokers}"],
    ["run", "teacher-distiller", "--brokers", "{brokers}"],
], ids=lambda flags: flags[1])
def test_check_finds_nothing(place: Place, flags: list[str]):
    done = place.run(*flags, "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert "ready to start" in done.stdout


@pytest.mark.parametrize("service", sorted(installed()))
def test_check_finds_a_broker_that_is_down(place: Place, service: str):
    done = place.run("run", service, "--brokers", "127.0.0.1:{closed_port}", "--check",
                     "--endpoints", '{"text": {"url": "http://127.0.0.1:{taken_port}"}}')
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "no connection (refused)" in done.stderr


@pytest.mark.parametrize("service", ["generator", "teacher-distiller"])
def test_check_finds_a_server_that_is_down(place: Place, service: str):
    up = ["--endpoints", '{"text": {"url": "http://127.0.0.1:{taken_port}"}}']
    down = ["--endpoints", '{"gone": {"url": "http://127.0.0.1:{closed_port}"}}']
    assert place.run("run", service, "--brokers", "{brokers}", "--check", *up).returncode == 0
    done = place.run("run", service, "--brokers", "{brokers}", "--check", *down)
    assert done.returncode == 1, done.stderr
    assert "endpoints.gone.url = " in done.stderr
