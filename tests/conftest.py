"""Real brokers for tests, started once a session: the embedded one, and Kafka where it is there."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiokafka.admin import AIOKafkaAdminClient
from rig import Engine

from rollstream.shared import brokers
from rollstream.shared.config import ConfigError


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--brokers", choices=["embedded", "kafka", "all"], default=None,
        help="which brokers the `broker` fixture runs over [all where KAFKA_HOME is set]",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`broker` runs a test once for each kind."""
    if "broker" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("--brokers")
    chosen = chosen or ("all" if os.environ.get("KAFKA_HOME") else "embedded")
    kinds = []
    if chosen in ("embedded", "all"):
        kinds.append(pytest.param("embedded"))
    if chosen in ("kafka", "all"):
        kinds.append(pytest.param("kafka", marks=pytest.mark.kafka))
    metafunc.parametrize("broker", kinds, indirect=True)


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap address of an embedded broker."""
    yield from _started("embedded", tmp_path_factory.mktemp("embedded"))


@pytest.fixture(scope="session")
def real_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap address of an Apache Kafka; mark the test `kafka`."""
    yield from _started("kafka", tmp_path_factory.mktemp("kafka"))


def _started(kind: brokers.BrokerKind, folder: Path) -> Iterator[str]:
    try:
        broker = brokers.start(kind, folder)
    except ConfigError as error:
        pytest.skip(str(error))
    yield broker.bootstrap
    broker.stop()


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> str:
    """Bootstrap address of each broker in turn."""
    return request.getfixturevalue("embedded" if request.param == "embedded" else "real_kafka")


@pytest.fixture
def prefix() -> str:
    """A topic prefix of this test's own."""
    return f"t{uuid.uuid4().hex[:10]}"


@pytest_asyncio.fixture
async def admin(broker: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """A started admin client of `broker`."""
    async with _admin(broker) as client:
        yield client


@pytest_asyncio.fixture
async def kafka_admin(real_kafka: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """A started admin client of the real Kafka; mark the test `kafka`."""
    async with _admin(real_kafka) as client:
        yield client


@contextlib.asynccontextmanager
async def _admin(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await client.start()
    yield client
    await client.close()


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """The CPU engine with the real model."""
    started = Engine(tmp_path_factory.mktemp("engine"))
    await started.start()
    yield started
    await started.stop()


@pytest_asyncio.fixture
async def scripted(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine that gives the `ANSWERS` of the test's module."""
    started = Engine(tmp_path / "scripted", request.module.ANSWERS)
    await started.start()
    yield started
    await started.stop()
