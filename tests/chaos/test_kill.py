"""kill -9 under load: nothing finished is lost, nothing is delivered twice, nothing is torn."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from reckoning import reckon
from rig import MODEL, Engine, Rig, rig

from rollstream.shared.records import Rollout
from rollstream.shared.registry import set_status
from rollstream.shared.runs import RunConfig, Status, Teacher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

GROUPS, K = 60, 4
KILLS = 10
IN_FLIGHT = 16
ANSWERS = [{"text": f"{n} + 1 = {n + 1}", "delay_s": 1.0} for n in range(7)]
ALL = ["sink", "teacher-distiller", "scorer", "generator", "prompt-producer"]


@pytest.mark.parametrize("victims", [ALL, ["scorer"]], ids=["all-five", "scorers"])
async def test_kill_under_load(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine, victims: list[str]
):
    """Two of each of the five; some are killed in turn at random moments, and started again.

    The judge draws a number for each scoring of a group: none may be mixed of two scorings, and
    the first in the log is the one delivered.
    """
    pick = random.Random(1)
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        made.judge()
        for name in (*ALL, *reversed(ALL)):
            await made.service(name, "--max-in-flight", str(IN_FLIGHT))
        before = scripted.finished_requests("stop")
        config = await made.run(
            "sft", "killed", env="judge_env", env_args={"rows": GROUPS}, epochs=1, group_size=K,
            max_in_flight=32, teacher=Teacher(endpoint=scripted.url, model=MODEL, top_k=1),
        )
        killed: Counter[str] = Counter()
        for at in range(KILLS):
            await asyncio.sleep(pick.uniform(0.5, 2.5))
            killed[made.hurt(victims[at % len(victims)], pick).name] += 1
        assert (await made.books(config)).delivered < GROUPS, "it was over before the last kill"
        await made.done(config, timeout_s=300)

        found = await reckon(made, config, groups=GROUPS)
        assert (found.delivered, found.lost, found.doubled, found.torn) == (GROUPS, 0, 0, 0)
        # Only what was in flight at the kill of a generator is generated again.
        assert found.repeated == 0
        asked_again = scripted.finished_requests("stop") - before - GROUPS * K
        assert found.again <= asked_again <= killed["generator"] * IN_FLIGHT
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
