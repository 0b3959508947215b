"""kill -9 under load: nothing finished is lost, nothing is delivered twice, nothing is torn."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from reckoning import reckon
from rig import MODEL, Engine, Rig, rig

from rollstream.services.cli.propose import set_status
from rollstream.shared.records import Rollout
from rollstream.shared.runs import RunConfig, Status, Teacher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

GROUPS, K = 60, 4
KILLS = 10
IN_FLIGHT = 16
ANSWERS = [{"text": f"{n} + 1 = {n + 1}", "delay_s": 0.3} for n in range(7)]
ALL = ["sink", "teacher-distiller", "scorer", "generator", "prompt-producer"]


@pytest.fixture
async def scripted(tmp_path: Path):
    engine = Engine(tmp_path / "scripted", ANSWERS)
    await engine.start()
    yield engine
    await engine.stop()


def kill(made: Rig, name: str, pick: random.Random) -> None:
    """kill -9 one running process of a service at random; it is started again after a second."""
    victim = pick.choice([child for child in made.children.running() if child.name == name])
    assert victim.process is not None
    victim.process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("seed", [1])
async def test_kill_any_service_under_load(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine, seed: int
):
    """Two of each of the five, killed in turn at random moments; a judge that answers at random."""
    pick = random.Random(seed)
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        made.judge()
        for name in (*ALL, *reversed(ALL)):
            await made.service(name, "--max-in-flight", str(IN_FLIGHT))
        config = await made.run(
            "sft", "killed", env="judge_env", env_args={"rows": GROUPS}, epochs=1, group_size=K,
            max_in_flight=64, teacher=Teacher(endpoint=scripted.url, model=MODEL, top_k=1),
        )
        killed: Counter[str] = Counter()
        before = scripted.finished_requests()
        for at in range(KILLS):
            await asyncio.sleep(pick.uniform(0.5, 2.5))
            name = ALL[at % len(ALL)]
            kill(made, name, pick)
            killed[name] += 1
        await made.done(config, timeout_s=300)

        found = await reckon(made, config, groups=GROUPS)
        assert (found.delivered, found.lost, found.doubled, found.torn) == (GROUPS, 0, 0, 0)
        # Only what was in flight at the kill of a generator is generated again; the engine was
        # asked for no more than that (and for what it can do, by each process that started).
        assert found.again <= killed["generator"] * IN_FLIGHT
        asked = scripted.finished_requests() - before
        teaching = GROUPS * K + killed["teacher-distiller"] * IN_FLIGHT * K
        assert asked <= GROUPS * K + killed["generator"] * IN_FLIGHT + teaching + 10 * KILLS
        assert all(line["distill_token_ids"] for line in made.dataset(config))


async def finished_identities(made: Rig, config: RunConfig) -> set[tuple[int, int]]:
    return {(r.n, r.i) for r in await made.records(config, "rollouts") if isinstance(r, Rollout)}


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
