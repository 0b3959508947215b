"""One engine with the real model and one with a script, for all contract tests."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from engine_server import Client, Server

from rollstream.services.engine.convert import ModelNotFound, default_cache, locate, prepare
from rollstream.shared.inference import transport


@pytest.fixture(scope="session")
def folder() -> Path:
    try:
        return prepare(locate("smollm2"), default_cache())
    except ModelNotFound as error:
        pytest.skip(f"smollm2 {error}")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    running = Server()
    yield running
    assert running.stop() == 0


async def client_of(server: Server, backend: str = "numpy") -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield Client(session, server.url, backend)


@pytest.fixture(scope="session")
def vllm_server() -> Iterator[Server]:
    """Real vLLM with the same model, as `--backend vllm` starts it."""
    if not (python := os.environ.get("VLLM_PYTHON")):
        pytest.skip("VLLM_PYTHON names no python that has vllm: use `make test-vllm`")
    running = Server("--backend", "vllm", "--vllm-python", python,
                     "--vllm-flags", "--enforce-eager --dtype bfloat16")
    yield running
    assert running.stop() == 0


@pytest_asyncio.fixture
async def engine(server: Server) -> AsyncIterator[Client]:
    """Only this project's engine: what is its own."""
    async for client in client_of(server):
        yield client


BOTH = ["numpy", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(400)])]


@pytest_asyncio.fixture(params=BOTH)
async def both(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """This project's engine, and real vLLM: one contract for the two."""
    name = "server" if request.param == "numpy" else "vllm_server"
    async for client in client_of(request.getfixturevalue(name), request.param):
        yield client


@pytest.fixture(scope="session")
def scripted_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    script = tmp_path_factory.mktemp("script") / "script.jsonl"
    lines = [
        {"match": "sum", "text": "it is 7"}, {"match": "sum", "text": "it is 8"},
        {"match": "broken", "status": 500, "message": "out of order"},
        {"match": "slow", "text": "late", "delay_s": 0.3}, {"text": "well " * 50},
    ]
    script.write_text("\n".join(map(json.dumps, lines)))
    running = Server("--script", str(script))
    yield running
    assert running.stop() == 0


@pytest_asyncio.fixture
async def scripted(scripted_server: Server) -> AsyncIterator[Client]:
    async for client in client_of(scripted_server):
        yield client


@pytest.fixture
def without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inference client tries again at once."""
    monkeypatch.setattr(transport, "BACKOFF_S", 0.01)
