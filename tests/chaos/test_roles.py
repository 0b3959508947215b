"""Single-active roles: the one that is killed is followed by another, which overwrites nothing."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from rig import Engine, Rig, rig

from rollstream.services.cli.processes import Child
from rollstream.shared.client.trainer import TrainerClient, TrainerError
from rollstream.shared.records import Ended, Issued, Outcome
from rollstream.shared.runs import Filters, RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS, K = 24, 2


@pytest.fixture
async def scripted(tmp_path: Path):
    engine = Engine(tmp_path / "scripted", [{"text": "It is 1.", "delay_s": 0.8}])
    await engine.start()
    yield engine
    await engine.stop()


async def active(made: Rig, children: list[Child], word: str) -> Child:
    """The one of these that does the work, told by a word in its log."""
    for _ in range(200):
        found = [c for c in children if c.running and word in c.log.read_text()]
        if found:
            return found[-1]
        await asyncio.sleep(0.2)
    raise AssertionError(f"nobody is active\n{made.logs()}")


async def judged(made: Rig, pipeline: str, **fields: object) -> RunConfig:
    return await made.run(pipeline, "roles", env="judge_env", env_args={"rows": ROWS},
                          group_size=K, max_in_flight=8, **fields)


async def test_producer_and_report_sink_are_killed_in_office(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    """Two of each, by mistake or as stand-bys; both offices change hands while groups come."""
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        made.judge()
        await made.services("scorer", "generator")
        sinks = [await made.service("sink") for _ in range(2)]
        producers = [await made.service("prompt-producer") for _ in range(2)]
        config = await judged(made, "eval")
        await made.filled(config, "rollouts", 8)
        # Both stand by until one is given the role; which one, the group protocol says.
        for children, path in ((producers, "ledger"), (sinks, "ledger")):
            before = await made.written(config, path)
            await made.kill(children[0])
            await made.filled(config, path, before + 4)
        await made.done(config, timeout_s=150)
        ledger = await made.records(config, "ledger")
        issued = Counter(record.n for record in ledger if isinstance(record, Issued))
        assert set(issued.values()) == {1}
        ends = Counter(record.n for record in ledger if isinstance(record, Ended))
        books = await made.books(config)
        assert books.balanced
        assert books.delivered == len(issued) == len(ends)
        lines = (Path(config.sink.out) / "samples.jsonl").read_text().splitlines()
        assert len(lines) == len({json.loads(line)["question"] for line in lines}) * K
        assert len(lines) == books.delivered * K


async def test_the_trainer_sink_is_killed_between_offer_and_acknowledgement(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    """The batch that was out is offered again, marked; no group comes under two batches."""
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        made.judge()
        await made.services("scorer", "generator", "prompt-producer")
        sinks = [await made.service("sink") for _ in range(2)]
        config = await judged(
            made, "rl", batch_size=8, total_steps=5, filters=Filters(zero_variance="off")
        )
        client_url = f"http://{config.sink.host}:{config.sink.port}"
        client = TrainerClient(client_url)
        taken: dict[int, list[list[int]]] = {}
        again = 0

        async def batch() -> None:
            nonlocal again
            for _ in range(300):
                try:
                    found = await asyncio.to_thread(client.next_batch)
                except (TrainerError, OSError):
                    found = None
                if found is not None:
                    again += found.redelivered
                    tokens = [t.tokens.tolist() for t in found.trajectories]
                    assert taken.setdefault(found.id, tokens) == tokens
                    return
                await asyncio.sleep(0.3)
            raise AssertionError(f"no batch came\n{made.logs()}")

        await asyncio.to_thread(client.wait_until_up, 60)
        await asyncio.to_thread(lambda: client.register(batch_size=8))
        for step in range(5):
            await batch()
            if step in (1, 3):
                holder = await active(made, sinks, "trainer API")
                assert holder.process is not None
                holder.process.kill()
                # The trainer has lost it too: it comes again, the same, and marked.
                client = TrainerClient(client_url)
                await batch()
            await asyncio.to_thread(client.acknowledge)
        await made.done(config, timeout_s=120)
        assert len(taken) == 5
        assert again == 2
        books = await made.books(config)
        assert books.balanced
        assert books.delivered == 5 * 8 // K
        ledger = await made.records(config, "ledger")
        delivered = Counter(
            r.n for r in ledger if isinstance(r, Ended) and r.outcome is Outcome.DELIVERED
        )
        assert len(delivered) == books.delivered
