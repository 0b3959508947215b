import subprocess
import sys

import aiohttp
import pytest

from rollstream.shared.config import ConfigError
from rollstream.shared.health import STUCK_EXIT_CODE, Health, HealthServer


async def get(server, path):
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://{server.host}:{server.port}{path}") as answer,
    ):
        return answer.status, await answer.text()


@pytest.fixture
async def served():
    health = Health()
    server = HealthServer(0, health, lambda: {"loops": 2})
    await server.start()
    yield health, server
    await server.stop()


def test_not_ready_until_every_named_condition_holds():
    health = Health()
    assert health.reasons() == {"service": "starting"}
    health.set_ready("broker", True)
    health.set_ready("model", False, "loading")
    assert health.reasons() == {"model": "loading"}
    health.set_ready("model", True)
    assert health.reasons() == {}
    health.set_ready("broker", False)
    assert health.reasons() == {"broker": "not yet"}


def test_stuck_after_the_limit_and_not_before():
    health = Health()
    health.watch("loop", 30.0, now=100.0)
    assert health.stuck(130.0) == {}
    assert health.stuck(131.0) == {"loop": 31.0}
    health.beat("loop", 131.0)
    assert health.stuck(161.0) == {}
    assert health.stuck(162.0) == {"loop": 31.0}
    health.unwatch("loop")
    health.beat("loop", 170.0)
    assert health.stuck(1e9) == {}


async def test_readyz_gives_the_reasons(served):
    health, server = served
    health.set_ready("model", False, "loading")
    assert await get(server, "/readyz") == (503, '{"ready":false,"reasons":{"model":"loading"}}')
    health.set_ready("model", True)
    assert await get(server, "/readyz") == (200, '{"ready":true,"reasons":{}}')


async def test_livez_fails_when_something_is_stuck(served):
    health, server = served
    assert (await get(server, "/livez"))[0] == 200
    health.watch("scorer", 5.0, now=-1e9)
    status, text = await get(server, "/livez")
    assert status == 500
    assert '"scorer"' in text


async def test_metrics_and_statusz(served):
    _, server = served
    status, text = await get(server, "/metrics")
    assert status == 200
    assert "# TYPE" in text
    assert await get(server, "/statusz") == (200, '{"loops":2}')


async def test_a_taken_port_is_said_with_flag_value_and_fix(served):
    _, server = served
    with pytest.raises(ConfigError, match=rf"--health-port = {server.port}: .*in use: give anoth"):
        await HealthServer(server.port, Health()).start()


def test_a_stuck_event_loop_ends_the_process_loudly():
    program = """
import asyncio, time
from rollstream.shared.health import Health, beat_event_loop, exit_when_stuck
async def main():
    health = Health()
    exit_when_stuck(health, check_every_s=0.05)
    task = asyncio.create_task(beat_event_loop(health, 0.5))
    await asyncio.sleep(0.1)
    time.sleep(60)
asyncio.run(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == STUCK_EXIT_CODE
    assert "event loop stuck" in result.stderr
    assert "in main" in result.stderr, "the stack shows where it hangs"
