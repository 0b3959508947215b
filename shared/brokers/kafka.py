"""One Apache Kafka 4.x on this machine, durable, without Docker: `KAFKA_HOME` and Java 17.

KAFKA_HOME is an unpacked distribution; only its `libs/*.jar` are used. The folder holds the data,
the settings, the port and the log: starting it again goes on where it ended, also after kill -9.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

from rollstream.shared.brokers.broker import (
    Broker,
    BrokerError,
    free_port,
    is_free,
    last_words,
    log_since,
    log_size,
    spawn,
    wait_until,
)
from rollstream.shared.config import ConfigError

START_S = 60.0
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
_ATTEMPTS = 3

_LOGGING = """\
status = error
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
logger.server.name = kafka.server.KafkaRaftServer
logger.server.level = info
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
"""


def start(folder: Path) -> Broker:
    """Start one on 127.0.0.1 with its data in `folder`; returns once it serves.

    The port is the one of the last start where it is free.
    Raises ConfigError naming KAFKA_HOME or java, BrokerError where it does not start in 60 s.
    """
    folder = folder.resolve()
    java = _java(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log4j2.properties").write_text(_LOGGING)
    log_path, settings = folder / "broker.log", folder / "server.properties"
    port, controller_port = _remembered_ports(settings)
    said = ""
    for _ in range(_ATTEMPTS):  # somebody may take a port between our choice and its bind
        settings.write_text(_properties(folder / "data", port, controller_port))
        if not (folder / "data" / "meta.properties").exists():
            _format(java, settings)
        before = log_size(log_path)
        process = spawn([*java, "kafka.Kafka", str(settings)], log_path)
        broker = Broker("kafka", f"127.0.0.1:{port}", process, log_path)
        if wait_until(partial(_started, log_path, before), broker, START_S):
            return broker
        broker.kill()
        said = log_since(log_path, before)
        if "Address already in use" not in said:
            break
        port, controller_port = free_port(), free_port()
    raise BrokerError(
        f"Kafka did not start in {START_S:.0f} s, "
        f"its log {log_path} ends: {_explained(last_words(said))}"
    )


def _started(log_path: Path, since: int) -> bool:
    return "Kafka Server started" in log_since(log_path, since)


def _java(folder: Path) -> list[str]:
    """The command line up to the main class."""
    home = os.environ.get("KAFKA_HOME", "")
    fix = "set it to an unpacked Apache Kafka 4.x (the folder that holds libs/)"
    if not home:
        raise ConfigError("KAFKA_HOME", "(not set)", fix)
    if not any(Path(home, "libs").glob("kafka-server-*.jar")):
        raise ConfigError("KAFKA_HOME", home, f"no libs/kafka-server-*.jar in it; {fix}")
    java_home = os.environ.get("JAVA_HOME")
    program = shutil.which("java", path=str(Path(java_home, "bin")) if java_home else None)
    if program is None:
        where = ("JAVA_HOME", java_home) if java_home else ("PATH", "(no java)")
        raise ConfigError(*where, "install Java 17 or newer, e.g. openjdk-17-jre-headless")
    return [
        program, "-Xmx512m", "-XX:+UseSerialGC", "-Xshare:auto",
        f"-Dlog4j2.configurationFile={folder / 'log4j2.properties'}",
        "-cp", str(Path(home, "libs", "*")),
    ]


def _format(java: list[str], settings: Path) -> None:
    cluster_id = base64.urlsafe_b64encode(b"R" + os.urandom(15)).rstrip(b"=").decode()
    result = subprocess.run(
        [*java, "kafka.tools.StorageTool", "format", "--ignore-formatted",
         "-t", cluster_id, "-c", str(settings)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S, check=False,
    )
    if result.returncode:
        said = " | ".join((result.stderr or result.stdout).strip().splitlines()[-3:])
        raise BrokerError(f"Kafka's storage in {settings.parent} can't be made: {_explained(said)}")


def _explained(said: str) -> str:
    if "UnsupportedClassVersionError" in said:
        return "this Java is too old: install 17 or newer, or point JAVA_HOME at it"
    return said


def _remembered_ports(settings: Path) -> tuple[int, int]:
    """The ports of the last start where both are free, else new ones."""
    if settings.exists():
        values = dict(
            line.split("=", 1) for line in settings.read_text().splitlines() if "=" in line
        )
        try:
            client, controller = (
                int(address.rsplit(":", 1)[1]) for address in values["listeners"].split(",")
            )
            if is_free(client) and is_free(controller):
                return client, controller
        except (KeyError, ValueError, IndexError):
            pass
    return free_port(), free_port()


def _properties(data: Path, port: int, controller_port: int) -> str:
    values = {
        "process.roles": "broker,controller",
        "node.id": 0,
        "controller.quorum.voters": f"0@127.0.0.1:{controller_port}",
        "listeners": f"CLIENT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"CLIENT://127.0.0.1:{port}",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "CLIENT",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": data,
        "auto.create.topics.enable": "false",
        "message.max.bytes": MAX_MESSAGE_BYTES,
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 5,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "group.initial.rebalance.delay.ms": 0,
        "group.min.session.timeout.ms": 1000,
        # After kill -9 it must wait until its old session is over before it may come back.
        "broker.session.timeout.ms": 3000,
        "broker.heartbeat.interval.ms": 500,
    }
    return "".join(f"{key}={value}\n" for key, value in values.items())
