"""One `rollstream up` a folder, by a lock that the kernel lets go of."""

import os
import subprocess
import sys

import msgspec
import pytest

from rollstream.services.cli.connect import UP_FILE, UpFile, only_up, running_up
from rollstream.shared.config import ConfigError

HOLD = """
import sys
from rollstream.services.cli.connect import only_up
with only_up():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_up_is_found_once_it_is_ready_and_not_after_its_end():
    assert running_up() is None
    told = UpFile("localhost:1", 4, os.getpid())
    with only_up():
        assert running_up() is None
        UP_FILE.write_bytes(msgspec.json.encode(told))
        assert running_up() == told
        with pytest.raises(ConfigError, match="runs here already"), only_up():
            pass
        assert running_up() == told
    assert running_up() is None
    assert not UP_FILE.exists()


def test_a_file_left_by_a_kill_is_no_running_up():
    """Though a process has its pid: ours."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    UP_FILE.write_bytes(msgspec.json.encode(UpFile("localhost:1", 4, os.getpid())))
    assert running_up() is not None
    holder.kill()
    holder.communicate(timeout=10)
    assert running_up() is None
    with only_up():
        assert not UP_FILE.exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="start it where files can be written"), only_up():
        pass
