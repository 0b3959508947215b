"""kill -9 under load: nothing finished is lost, nothing is delivered twice, nothing is torn."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from rig import Engine, Rig, rig

from rollstream.shared.records import Rollout
from rollstream.shared.runs import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

GROUPS = 60
KILLS = 8
ANSWERS = [{"text": f"{n} + 1 = {n + 1}", "delay_s": 0.3} for n in range(7)]


@pytest.fixture
async def scripted(tmp_path: Path):
    engine = Engine(tmp_path / "scripted", ANSWERS)
    await engine.start()
    yield engine
    await engine.stop()


def kill(made: Rig, names: list[str], pick: random.Random) -> str:
    """kill -9 one running service process at random."""
    living = [c for c in made.children.running() if c.name in names]
    victim = pick.choice(living)
    assert victim.process is not None
    victim.process.send_signal(signal.SIGKILL)
    return victim.name


async def finished_identities(made: Rig, config: RunConfig) -> set[tuple[int, int]]:
    return {(r.n, r.i) for r in await made.records(config, "rollouts") if isinstance(r, Rollout)}


@pytest.mark.parametrize("seed", [1])
async def test_kill_any_service_under_load(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine, seed: int
):
    """Two of each where the work is shared; then the books, the files and the engine's count."""
    pick = random.Random(seed)
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        flags = ("--max-in-flight", "16")
        for name in ("sink", "scorer", "generator", "prompt-producer"):
            await made.service(name, *flags)
        for name in ("generator", "scorer", "sink", "prompt-producer"):
            await made.service(name, *flags)
        config = await made.run("sft", "killed", total_groups=GROUPS, max_in_flight=64)
        killed: Counter[str] = Counter()
        names = ["sink", "scorer", "generator", "prompt-producer"]
        for n in range(KILLS):
            await asyncio.sleep(pick.uniform(0.5, 2.5))
            killed[kill(made, [names[n % len(names)]], pick)] += 1
        await made.done(config, timeout_s=300)

        books = await made.books(config)
        assert books.balanced
        assert (books.delivered, books.in_flight, books.parked) == (GROUPS, 0, 0), books
        lines = made.dataset(config)
        assert len(lines) == books.delivered
        assert all(len(line["scores"]) == 4 for line in lines)

        rollouts = await made.records(config, "rollouts")
        again = len(rollouts) - len({(r.n, r.i) for r in rollouts})
        in_flight_at_kills = killed["generator"] * 16
        assert again <= in_flight_at_kills, f"{again} finished rollouts were generated again"
        requests = scripted.finished_requests()
        assert requests <= GROUPS * 4 + in_flight_at_kills + 8


async def test_a_stopped_run_closes_its_groups_as_cancelled(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        for name in ("sink", "scorer", "generator", "prompt-producer"):
            await made.service(name, "--max-in-flight", "4")
        config = await made.run("sft", "stopped", total_groups=200, max_in_flight=64)
        await asyncio.sleep(6)
        await made.stop(config)
        await made.done(config)
        books = await made.books(config)
        assert books.balanced
        assert books.in_flight == 0
        assert books.dropped.get("cancelled", 0) > 0
        assert len(made.dataset(config)) == books.delivered


async def test_a_paused_run_stands_still_and_goes_on(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    from rollstream.services.cli.propose import set_status
    from rollstream.shared.runs import Status

    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        for name in ("sink", "scorer", "generator", "prompt-producer"):
            await made.service(name, "--max-in-flight", "8")
        config = await made.run("sft", "paused", total_groups=20)
        await asyncio.sleep(3)
        await set_status(made.bus, prefix, config.run, Status.PAUSED, "by a test")
        await asyncio.sleep(6)
        before = await finished_identities(made, config)
        await asyncio.sleep(3)
        assert await finished_identities(made, config) == before
        assert len(before) < 80
        await set_status(made.bus, prefix, config.run, Status.RUNNING, "by a test")
        await made.done(config)
        assert (await made.books(config)).delivered == 20
        assert len(made.dataset(config)) == 20
