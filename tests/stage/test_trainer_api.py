"""The trainer leaf against real brokers, by an unchanged client and a new one."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from trainer_rig import (
    BATCH,
    REGISTRATION,
    WAIT_S,
    Member,
    config,
    group,
    numbers,
    put,
    topics_of,
)

from rollstream.services.sink.service import Sink
from rollstream.shared.client import TrainerClient
from rollstream.shared.control import Acked, Offered, PolicyVersion
from rollstream.shared.records import Kind
from rollstream.shared.runs import Refusal, Status


async def test_an_unchanged_client_gets_one_batch_a_round_and_acknowledges_by_asking_again(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    run = config(prefix, tmp_path, total_steps=2)
    async with topics_of(run, broker) as writer:
        await put(writer, run, *(group(n, version=1 if n < 2 else 0) for n in range(5)))
        await put(writer, run, group(5, kind=Kind.DROPPED))
        member = Member(run, broker)
        await member.up()
        assert (await member.call("/"))["message"] == "AtroposLib API"
        assert await member.call("/info") == {"batch_size": -1, "max_token_len": -1}
        assert (await member.call("/batch"))["status"] == "error"
        assert "uuid" in await member.call("/register", REGISTRATION)
        assert await member.call("/info") == {"batch_size": BATCH, "max_token_len": 2048}
        assert await member.call("/wandb_info") == {"group": "g", "project": "p"}
        first = await member.batch()
        assert numbers(first) == [2, 3]  # the oldest version first
        assert set(first["batch"][0]) >= {"overrides", "images", "distill_logprobs"}
        assert await member.call("/batch") == {"batch": None}
        assert (await member.ledger()).delivered == 0
        second = await member.batch()
        assert numbers(second) == [4, 0]
        assert (await member.ledger()).delivered == 2
        assert await member.call("/batch") == {"batch": None, "done": True}
        books = await member.ledger(lambda b: b.books()[0].in_flight == 0)
        assert (books.delivered, books.reward_sum, books.reward_count) == (4, 4.0, 8)
        assert books.dropped == {"dropped": 1, "not_needed": 1}
        member.context.status = Status.DONE
        await asyncio.wait_for(member.task, WAIT_S)
        control = await member.control()
    assert [type(r) for r in control] == [
        PolicyVersion, Offered, PolicyVersion, Acked, Offered, PolicyVersion, Acked
    ]
    assert [r.version for r in control if isinstance(r, PolicyVersion)] == [0, 1, 2]
    assert [r.groups for r in control if isinstance(r, Offered)] == [[2, 3], [4, 0]]


async def test_a_batch_that_could_not_be_written_is_handed_out_again(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    run = config(prefix, tmp_path)
    async with topics_of(run, broker) as writer:
        await put(writer, run, *(group(n) for n in range(4)))
        member = Member(run, broker)
        await member.up()
        await member.call("/register", REGISTRATION)
        with socket.create_connection(("127.0.0.1", run.sink.port)) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.sendall(b"GET /batch HTTP/1.1\r\nHost: x\r\n\r\n")
        deadline = time.monotonic() + WAIT_S
        while not any(isinstance(r, Offered) for r in await member.control()):
            assert time.monotonic() < deadline
        answer = await member.call("/batch")
        assert (numbers(answer), answer["batch_id"]) == ([0, 1], 0)
        await member.drain()


async def test_a_stale_group_is_dropped_at_hand_out(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    run = config(prefix, tmp_path, max_staleness=1)
    async with topics_of(run, broker) as writer:
        await put(writer, run, *(group(n, version=5) for n in range(3)), group(3, version=3))
        member = Member(run, broker)
        await member.up()
        await member.call("/register", {**REGISTRATION, "starting_step": 5})
        assert numbers(await member.batch()) == [0, 1]
        books = await member.ledger(lambda b: bool(b.books()[0].dropped))
        assert books.dropped == {"stale": 1}
        await member.drain()


async def test_a_stopped_run_ends_what_waits(broker: str, prefix: str, tmp_path: Path) -> None:
    run = config(prefix, tmp_path)
    async with topics_of(run, broker) as writer:
        await put(writer, run, *(group(n) for n in range(3)))
        member = Member(run, broker)
        await member.up()
        await member.call("/register", REGISTRATION)
        await member.batch()
        member.context.status = Status.STOPPED
        books = await member.ledger(lambda b: b.books()[0].in_flight == 0)
        assert (books.delivered, books.dropped) == (2, {"cancelled": 1})
        assert (await member.call("/batch"))["done"] is True
        await member.drain()


async def test_the_numpy_client_acknowledges_and_the_example_client_runs(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    run = config(prefix, tmp_path, total_steps=4)

    def train(url: str) -> list[tuple[int, int]]:
        client = TrainerClient(url)
        client.wait_until_up(WAIT_S)
        client.register(batch_size=BATCH)
        seen = []
        for batch in client.batches(wait_s=WAIT_S):
            assert sum(len(t.tokens) for t in batch.trajectories) == 3 * BATCH
            assert all(t.mask.tolist() == [False, False, True] for t in batch.trajectories)
            assert all(
                t.logprobs is not None and t.logprobs.tolist() == [0, 0, -0.5]
                for t in batch.trajectories
            )
            seen.append((batch.id, batch.version))
            if len(seen) == 2:
                break
        client.acknowledge()
        return seen

    async with topics_of(run, broker) as writer:
        await put(writer, run, *(group(n) for n in range(8)))
        member = Member(run, broker)
        assert await asyncio.to_thread(train, member.url) == [(0, 0), (1, 1)]
        assert (await member.ledger()).delivered == 4
        example = Path(__file__).parents[2] / "examples" / "trainer_client.py"
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, str(example), "--url", member.url, "--batches", "2",
             "--batch-size", str(BATCH), "--wait-s", "30"],
            capture_output=True, text=True, timeout=WAIT_S, check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "batch 1: 2 groups, 4 samples, mean score 0.500" in done.stdout
        assert (await member.ledger(lambda b: b.books()[0].in_flight == 0)).delivered == 8
        await member.drain()


async def test_bad_requests_name_the_field(embedded: str, prefix: str, tmp_path: Path) -> None:
    run = config(prefix, tmp_path)
    async with topics_of(run, embedded):
        member = Member(run, embedded)
        await member.up()
        answer = await member.call("/register", {"batch_size": "many", "wandb_group": "g"})
        fields = {problem["loc"][-1]: problem["msg"] for problem in answer["detail"]}
        assert fields["starting_step"] == "field required"
        assert "int" in fields["batch_size"]
        answer = await member.call("/register", {**REGISTRATION, "batch_size": 6})
        assert "the run hands out 4" in answer["detail"][0]["msg"]
        async with aiohttp.ClientSession() as session:
            for path in ("/scored_data", "/scored_data_list"):
                async with session.post(member.url + path, json={}) as response:
                    assert response.status == 410
        env = {"max_token_length": 9, "desired_name": "e", "weight": 1.0, "group_size": 8}
        assert (await member.call("/register-env", env))["status"] == "wait for trainer to start"
        await member.call("/register", REGISTRATION)
        assert await member.call("/batch") == {"batch": None}
        assert (await member.call("/register-env", env))["wandb_name"] == "e_0"
        assert (await member.call("/status-env", {"env_id": 0}, "GET"))["env_weight"] == 1.0
        assert (await member.call("/latest_example"))["tokens"] == []
        assert (await member.call("/batch?ack=7"))["error"] == "batch 7 was not handed out"
        assert await member.call("/status") == {"current_step": 0, "queue_size": 0}
        await member.drain()


async def test_a_run_that_can_not_be_served_is_refused_by_name(tmp_path: Path) -> None:
    sink, route = Sink(), config("p", tmp_path).stages[-1]
    with pytest.raises(Refusal, match=r"batch_size = 5: use a multiple of group_size 2"):
        await sink.consider(config("p", tmp_path, batch_size=5), route)
    with pytest.raises(Refusal, match=r"sink = nobody"):
        await sink.consider(
            config("p", tmp_path), type(route)(pipeline="rl", instance="sink:nobody", input="x")
        )
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(Refusal, match=r"sink\.out"):
        await sink.consider(config("p", file), route)
    run = config("p", tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", run.sink.port))
        taken.listen()
        with pytest.raises(Refusal, match=rf"sink\.port = {run.sink.port}: use another port"):
            await sink.consider(run, route)
    assert await sink.consider(run, route) == {
        "leaf": "trainer", "kind": "trainer", "restored": []
    }
