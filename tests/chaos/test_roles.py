"""Single-active roles: the one that is killed is followed by another, which overwrites nothing."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rig import Engine, Rig, rig, signalled, status

from rollstream.services.cli.processes import Child
from rollstream.shared.client.trainer import TrainerClient, TrainerError
from rollstream.shared.records import Ended, Issued, Outcome
from rollstream.shared.runs import Filters, RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS, K = 40, 2
AT_WORK = ("working", "serving", "waiting for a trainer")
ANSWERS = [{"text": "It is 1.", "delay_s": 0.8}]


async def in_office(children: list[Child], made: Rig) -> Child:
    """The one of these that does the work; the others stand by."""
    deadline_s = time.monotonic() + 90
    while True:
        states = [(await status(child)).get("state") for child in children if child.running]
        at_work = [at for at, state in enumerate(states) if state in AT_WORK]
        if len(at_work) == 1:
            return [child for child in children if child.running][at_work[0]]
        assert time.monotonic() < deadline_s, f"{states}\n{made.logs()}"
        await asyncio.sleep(0.2)


async def judged(made: Rig, pipeline: str, **fields: Any) -> RunConfig:
    return await made.run(pipeline, "roles", env="judge_env", env_args={"rows": ROWS},
                          group_size=K, max_in_flight=8, **fields)


async def count(made: Rig, config: RunConfig, kind: type[Issued] | type[Ended]) -> int:
    return sum(isinstance(record, kind) for record in await made.records(config, "ledger"))


async def test_producer_and_report_sink_are_killed_in_office(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    """Two of each; the one that is active is killed while groups come, and the other takes over.

    No group is issued twice, and the report's file holds each row as if nothing had been.
    """
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        made.judge()
        await made.services("scorer", "generator")
        producers = [await made.service("prompt-producer") for _ in range(2)]
        sinks = [await made.service("sink") for _ in range(2)]
        config = await judged(made, "eval")
        await made.filled(config, "rollouts", 8)
        for children, writes in ((producers, Issued), (sinks, Ended)):
            await made.kill(await in_office(children, made))
            killed_s, before = time.monotonic(), await count(made, config, writes)
            assert before < ROWS, "there was nothing left to do"
            await in_office(children, made)
            while await count(made, config, writes) <= before:
                assert time.monotonic() < killed_s + 90, made.logs()
                await asyncio.sleep(0.2)
            print(f"{children[0].name}: followed after {time.monotonic() - killed_s:.1f} s")
        await made.done(config, timeout_s=150)
        ledger = await made.records(config, "ledger")
        issued = Counter(record.n for record in ledger if isinstance(record, Issued))
        assert issued == dict.fromkeys(range(ROWS), 1)
        books = await made.books(config)
        assert books.balanced
        assert books.delivered == ROWS
        lines = (Path(config.sink.out) / "samples.jsonl").read_text().splitlines()
        rows = Counter(json.loads(line)["question"] for line in lines)
        assert rows == {f"Say {n}.": K for n in range(ROWS)}


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
                signalled(await in_office(sinks, made), signal.SIGKILL)
                # The trainer has lost it too: it comes again, the same, and marked.
                client = TrainerClient(client_url)
                await batch()
            await asyncio.to_thread(client.acknowledge)
        await made.done(config, timeout_s=120)
        assert len(taken) == 5
        assert again == 2
        # The tokens hold the row's question, so that they tell groups apart.
        samples = Counter(tuple(tokens) for batch in taken.values() for tokens in batch)
        assert set(samples.values()) == {K}
        assert len(samples) == 5 * 8 // K
        books = await made.books(config)
        assert books.balanced
        assert books.delivered == 5 * 8 // K
        ledger = await made.records(config, "ledger")
        delivered = Counter(
            r.n for r in ledger if isinstance(r, Ended) and r.outcome is Outcome.DELIVERED
        )
        assert len(delivered) == books.delivered
