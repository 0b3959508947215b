"""The brokers that we start: they serve, end with us, and say what is missing."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from rollstream.shared import brokers
from rollstream.shared.brokers import embedded, kafka
from rollstream.shared.brokers.broker import free_port
from rollstream.shared.config import ConfigError


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def owner(tmp_path):
    """A process that started an embedded broker and waits; with the broker's pid."""
    program = (
        "import sys, time; from pathlib import Path; from rollstream.shared import brokers\n"
        "broker = brokers.start('embedded', Path(sys.argv[1]))\n"
        "print(broker.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()


def test_embedded_starts_on_loopback_only_and_stops(tmp_path):
    broker = brokers.start("embedded", tmp_path)
    try:
        assert broker.kind == "embedded"
        assert broker.alive()
        assert broker.rss_bytes() > 1_000_000
        sockets = psutil.Process(broker.pid).net_connections(kind="tcp")
        assert {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        host, port = broker.bootstrap.split(":")
        socket.create_connection((host, int(port)), timeout=5).close()
    finally:
        broker.stop()
    assert not broker.alive()
    assert broker.rss_bytes() == 0
    broker.stop()


def test_a_broker_that_died_is_noticed(tmp_path):
    broker = brokers.start("embedded", tmp_path)
    os.kill(broker.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while broker.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not broker.alive()
    broker.stop()


def test_the_broker_ends_with_its_owner_after_kill_9(owner):
    process, broker_pid = owner
    assert psutil.pid_exists(broker_pid)
    process.kill()
    process.wait()
    assert gone(broker_pid, 10)


def test_ctrl_c_in_the_terminal_does_not_reach_the_broker(owner):
    """The terminal signals the owner's process group; the broker outlives it until we stop it."""
    process, broker_pid = owner
    assert os.getpgid(broker_pid) != os.getpgid(process.pid)
    assert os.getsid(broker_pid) != os.getsid(process.pid)


def test_a_port_that_was_taken_meanwhile_is_tried_again(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        choices = iter([busy, free_port()])
        monkeypatch.setattr(embedded, "free_port", lambda: next(choices))
        broker = brokers.start("embedded", tmp_path)
        broker.stop()
        assert broker.bootstrap != f"127.0.0.1:{busy}"


def test_embedded_without_its_package_names_the_fix(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"--broker = embedded: .*pip install"):
        brokers.start("embedded", tmp_path)


def test_embedded_that_does_not_start_tells_its_last_words(tmp_path, monkeypatch):
    program = tmp_path / "broken"
    program.write_text("#!/bin/sh\necho no memory left\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(embedded, "_binary", lambda: str(program))
    with pytest.raises(brokers.BrokerError, match=r"did not start .* no memory left"):
        brokers.start("embedded", tmp_path)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"KAFKA_HOME": ""}, r"KAFKA_HOME = \(not set\): set it to an unpacked"),
        ({"KAFKA_HOME": "/nowhere"}, r"KAFKA_HOME = /nowhere: no libs/kafka-server"),
        ({"KAFKA_HOME": "libs", "JAVA_HOME": "/nojava"}, "JAVA_HOME = /nojava: install Java 17"),
        ({"KAFKA_HOME": "libs", "JAVA_HOME": "", "PATH": "/none"}, "PATH = .*: install Java 17"),
    ],
)
def test_kafka_without_its_parts_names_them(tmp_path, monkeypatch, variables, message):
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "kafka-server-4.0.0.jar").touch()
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path) if value == "libs" else value)
    with pytest.raises(ConfigError, match=message):
        brokers.start("kafka", tmp_path / "data")


def test_kafka_with_a_java_too_old_says_so(tmp_path, monkeypatch):
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "kafka-server-4.0.0.jar").touch()
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho java.lang.UnsupportedClassVersionError: x >&2\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(brokers.BrokerError, match="Java is too old: install 17"):
        brokers.start("kafka", tmp_path / "data")


def test_ports_are_remembered_while_they_are_free(tmp_path):
    settings = tmp_path / "server.properties"
    ports = kafka._remembered_ports(settings)
    settings.write_text(kafka._properties(tmp_path, *ports))
    assert kafka._remembered_ports(settings) == ports
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
        taken.listen()
        assert ports[0] not in kafka._remembered_ports(settings)
    settings.write_text("listeners=nonsense\n")
    assert all(port > 0 for port in kafka._remembered_ports(settings))
