"""The trainer announces weights, endpoints get them, and none is asked with others than are due."""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rig import Engine, Rig, rig, signalled

from rollstream.client import TrainerClient
from rollstream.shared.records import Rollout
from rollstream.shared.runs import Filters, RunConfig, Updates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

K, BATCH_GROUPS = 2, 2
ANSWERS = [{"text": f"10 + 10 = {n}", "delay_s": 0.3} for n in (20, 21)]


class Trainer:
    """Takes every batch as it comes, and announces when it is told to."""

    def __init__(self, config: RunConfig) -> None:
        self._url = f"http://127.0.0.1:{config.sink.port}"
        self._client = TrainerClient(self._url)
        self._batches = 0

    async def __aenter__(self) -> Trainer:
        client = TrainerClient(self._url)
        await asyncio.to_thread(client.wait_until_up)
        await asyncio.to_thread(lambda: client.register(batch_size=K * BATCH_GROUPS))
        self._taking = asyncio.create_task(self._take(client))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._taking.cancel()
        await asyncio.wait({self._taking})

    async def _take(self, client: TrainerClient) -> None:
        while not client.done:
            self._batches += await asyncio.to_thread(client.next_batch) is not None
            await asyncio.sleep(0.1)

    async def batches(self, count: int) -> None:
        """Wait until it has got so many more."""
        wanted, deadline_s = self._batches + count, time.monotonic() + 60
        while self._batches < wanted:
            assert not self._taking.done(), self._taking.exception()
            assert time.monotonic() < deadline_s, "no batch came"
            await asyncio.sleep(0.1)

    async def announce(self, version: int, weights: str = "") -> None:
        await asyncio.to_thread(self._client.announce, version, weights)

    async def live(self, label: str) -> None:
        deadline_s = time.monotonic() + 60
        while set((await asyncio.to_thread(self._client.live)).values()) != {label}:
            assert time.monotonic() < deadline_s, f"{label} did not become live"
            await asyncio.sleep(0.2)

    async def needed(self) -> list[str]:
        return await asyncio.to_thread(self._client.needed_weights)


async def rl(made: Rig, method: Any) -> RunConfig:
    return await made.run(
        "rl", "updated", group_size=K, batch_size=K * BATCH_GROUPS, total_steps=200,
        max_in_flight=8, max_staleness=50, updates=Updates(method=method),
        filters=Filters(zero_variance="off"),
    )


def get(engine: Engine, path: str) -> Any:
    with urllib.request.urlopen(engine.url.removesuffix("/v1") + path, timeout=5) as page:
        return json.loads(page.read())


async def versions(made: Rig, config: RunConfig) -> list[tuple[float, int]]:
    """When each rollout was written, and the oldest version of its tokens."""
    return [
        (at_s, min(span.version for q in record.sequences for span in q.versions))
        for at_s, record in await made.stamped(config, "rollouts") if isinstance(record, Rollout)
    ]


async def until_newer(made: Rig, config: RunConfig, version: int, after_s: float) -> None:
    deadline_s = time.monotonic() + 60
    while not any(at_s > after_s and v == version for at_s, v in await versions(made, config)):
        assert time.monotonic() < deadline_s, f"nothing of version {version}\n{made.logs()}"
        await asyncio.sleep(0.3)


async def test_weights_are_loaded_from_files_and_again_where_an_engine_starts_again(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        await made.services("sink", "scorer", "generator", "prompt-producer")
        config = await rl(made, "reload")
        async with Trainer(config) as trainer:
            await trainer.batches(1)
            assert {v for _, v in await versions(made, config)} == {0}
            await trainer.announce(1, "/weights/1")
            await trainer.live("1")
            await until_newer(made, config, 1, time.time())

            # It serves old weights when it is back; nobody asks it before they are replaced.
            signalled(scripted.child, signal.SIGKILL)
            assert scripted.child.process is not None
            await scripted.child.process.wait()
            await scripted.again()
            asked_with_old, label = 0, "default"
            while label != "1":
                answered = scripted.finished_requests()
                label = get(scripted, "/weight_info")["weight_version"]
                if label != "1":
                    asked_with_old = max(asked_with_old, answered)
                await asyncio.sleep(0.02)
            assert asked_with_old == 0
            await until_newer(made, config, 1, time.time())
            await trainer.batches(1)

            await trainer.announce(2, "/weights/2")
            await trainer.live("2")
            assert await trainer.needed() == ["/weights/2"]
            await until_newer(made, config, 2, time.time())
        assert {v for _, v in await versions(made, config)} == {0, 1, 2}
        rollouts = [r for r in await made.records(config, "rollouts") if isinstance(r, Rollout)]
        assert not [rollout.error for rollout in rollouts if rollout.error]
        await made.stop(config)
        await made.done(config)


async def test_a_trainer_that_moves_its_weights_itself_is_waited_for(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        await made.services("sink", "scorer", "generator", "prompt-producer")
        config = await rl(made, "trainer")
        async with Trainer(config) as trainer:
            await trainer.batches(1)
            await trainer.announce(1)
            await asyncio.sleep(2)
            before = len(await versions(made, config))
            await asyncio.sleep(2)
            assert len(await versions(made, config)) == before, "it was asked with other weights"
            request = urllib.request.Request(
                scripted.url.removesuffix("/v1") + "/update_weight_version", method="POST",
                data=b'{"new_version": "1"}', headers={"Content-Type": "application/json"},
            )
            await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=5).close())
            await trainer.live("1")
            await until_newer(made, config, 1, 0)
        await made.stop(config)
        await made.done(config)
