"""Starting: faults in one line, exit code 2; and the conversion that two may do at once."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from rollstream.services.engine import convert
from rollstream.services.engine.__main__ import main


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"XDG_CACHE_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "70000"], "--port 70000: must be at most 65535"),
        (["--max-batch", "0"], "--max-batch 0: must be at least 1"),
        (["--model", "no/such.gguf"], "--model no/such.gguf: is neither 'smollm2' nor the path"),
        (["--host", "203.0.113.7"], "--host 203.0.113.7 --port 0: "),
        (["--script", "no.jsonl"], "--script no.jsonl: No such file"),
        (["--cache", "/dev/null/x"], "--cache /dev/null/x: Not a directory; name a "
         "writable folder"),
        (["--backend", "vllm", "--model", "m"], "--backend vllm: vllm isn't installed"),
    ],
)
def test_a_fault_is_one_line_that_names_flag_and_value(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--port", "0", "--check", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"engine: {says}")
    assert error.count("\n") == 1


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 2
    assert f"--port {port}: Address already in use; name another" in capsys.readouterr().err


def test_a_file_that_is_no_llama_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUX" + bytes(100))
    assert main(["--port", "0", "--model", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"engine: --model {file}: ")
    assert not list((tmp_path / "rollstream/models").iterdir()), "nothing half-done is left"


def test_two_conversions_at_once_both_end_with_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=10)
    made: list[Path] = []

    def slow(gguf_file: Path, folder: Path) -> None:
        (folder / "weights.npy").write_text("half")
        both.wait()
        (folder / "weights.npy").write_text("whole")
        made.append(folder)

    monkeypatch.setattr(convert, "_convert", slow)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"weights")
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(convert.prepare(file, tmp_path / "cache")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(made) == len(found) == 2
    assert found[0] == found[1]
    assert (found[0] / "weights.npy").read_text() == "whole"
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [found[0].name]


def test_unpermute_turns_interleaved_pairs_into_halves() -> None:
    heads, dim, columns = 2, 6, 3
    halves = np.arange(heads * dim * columns, dtype=np.float32).reshape(heads * dim, columns)
    pairs = [
        head * dim + i + half * dim // 2
        for head in range(heads) for i in range(dim // 2) for half in range(2)
    ]
    np.testing.assert_array_equal(convert.unpermute(halves[pairs], heads), halves)
