"""`--backend vllm` keeps a vLLM running; a small program stands in for it here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PROGRAM = '''
import http.server, subprocess, sys, time
engine_core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if "--never-ready" in sys.argv:
    sys.exit(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """The environment in which `vllm` is the program above."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(PROGRAM)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def started(environment: dict[str, str], *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rollstream.services.engine", "--backend", "vllm", "--port", "0",
         "--model", "m", "--parent-pid", str(os.getpid()), *flags],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )


def vllm_of(engine: subprocess.Popen[str]) -> psutil.Process:
    [child] = psutil.Process(engine.pid).children()
    return child


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def ready(engine: subprocess.Popen[str]) -> str:
    assert engine.stdout is not None
    line = engine.stdout.readline()
    assert line.startswith("engine ready on http://127.0.0.1:"), line
    return line


def test_it_is_started_again_where_it_was_and_ends_with_all_of_its_processes(
    stand_in: dict[str, str]
):
    engine = started(stand_in)
    first_line = ready(engine)
    first = vllm_of(engine)
    [left_behind] = first.children()
    first.kill()
    assert ready(engine) == first_line
    assert not lives(left_behind), "it would hold the GPU"
    second = vllm_of(engine)
    living = [second, *second.children()]
    assert len(living) == 2
    engine.terminate()
    assert engine.wait(20) == 0
    assert not [process for process in living if lives(process)]


def test_one_that_never_becomes_ready_is_not_tried_for_ever(stand_in: dict[str, str]):
    engine = started(stand_in, "--vllm-flags=--never-ready")
    _, complained = engine.communicate(timeout=60)
    assert engine.returncode == 1
    assert "engine: vLLM ended with 3" in complained


def test_check_says_what_would_be_served_and_what_is_missing(stand_in: dict[str, str]):
    engine = started(stand_in, "--check")
    said, _ = engine.communicate(timeout=60)
    assert (engine.returncode, said) == (0, "engine can start: vLLM with m as m\n")
    engine = started(stand_in, "--check", "--vllm-python", "/no/such/python")
    _, complained = engine.communicate(timeout=60)
    assert engine.returncode == 2
    assert complained == "engine: --vllm-python /no/such/python: No such file or directory\n"
