"""The trainer leaf against real brokers, by an unchanged client and a new one, over restarts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollstream.services.sink.service import Sink
from rollstream.shared.arrays import pack
from rollstream.shared.bus import Bus, Lost, Writer
from rollstream.shared.client import TrainerClient, TrainerError
from rollstream.shared.codec import decode
from rollstream.shared.ledger import Ledger
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.log_reader import LogReader
from rollstream.shared.records import (
    Acked,
    EnvRef,
    Issued,
    Kind,
    Offered,
    PolicyVersion,
    Row,
    Sample,
    Scored,
    Sequence,
    Stop,
    VersionSpan,
)
from rollstream.shared.routes import builtin, stages
from rollstream.shared.runs import EnvironmentSource, Refusal, RunConfig, SinkSettings, Status
from rollstream.shared.service import RunContext
from rollstream.shared.topics import create, run_specs

PARTITIONS = 3
K = 2
BATCH = 4
WAIT_S = 60.0
REGISTRATION = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": BATCH, "max_token_len": 2048,
    "checkpoint_dir": "", "save_checkpoint_interval": 10, "starting_step": 0, "num_steps": 10,
}


def config(prefix: str, out: Path, log_id: str = "now", **fields: Any) -> RunConfig:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings: dict[str, Any] = {"group_size": K, "batch_size": BATCH, **fields}
    return RunConfig(
        run="r1", pipeline="rl", prefix=prefix, partitions=PARTITIONS, log_id=log_id, model="m",
        stages=stages(builtin(), "rl", teacher=False),
        environments=[EnvironmentSource(id="sums")],
        sink=SinkSettings(out=str(out), port=port), **settings,
    )


def group(n: int, version: int = 0, kind: Kind = Kind.SCORED) -> Scored:
    sequence = Sequence(
        tokens=pack([1, 2, n], "int32"), mask=pack([0, 0, 1], "uint8"),
        logprobs=pack([0, 0, -0.5], "float32"), versions=[VersionSpan(version, 2, 3)],
    )
    return Scored(
        run="r1", pipeline="rl", n=n, k=K, env=EnvRef(id="sums"), row=Row(prompt=[]), kind=kind,
        samples=[Sample(i=i, stop=Stop.STOP, reward=float(i), sequences=[sequence])
                 for i in range(K)],
    )


@contextlib.asynccontextmanager
async def topics_of(run: RunConfig, bootstrap: str) -> AsyncIterator[Writer]:
    bus = Bus(bootstrap, "test")
    admin = bus.admin()
    await admin.start()
    await create(admin, run_specs(run.prefix, "r1", "rl", ["scored", "ledger"], PARTITIONS))
    await admin.close()
    writer = await bus.writer()
    yield writer
    await writer.close()


async def put(writer: Writer, run: RunConfig, *groups: Scored) -> None:
    name = f"{run.prefix}.r1.rl"
    await asyncio.gather(*(
        writer.send(f"{name}.ledger", g.n % PARTITIONS, Issued(n=g.n, k=K)) for g in groups
    ))
    await asyncio.gather(*(writer.send(f"{name}.scored", g.n % PARTITIONS, g) for g in groups))


class Member:
    """A trainer sink at work in this process, and a plain HTTP client for it."""

    def __init__(self, run: RunConfig, bootstrap: str, name: str = "one") -> None:
        self.run = run
        self.bus = Bus(bootstrap, name, session_timeout_ms=1500)
        self.context = RunContext(run, run.stages[-1], self.bus)
        self.task = asyncio.create_task(Sink().attend(self.context))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.run.sink.port}"

    async def up(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.context.progress.state not in ("serving", "waiting for a trainer"):
            assert not self.task.done(), self.task.exception()
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    async def call(self, path: str, body: Any = None, method: str = "") -> Any:
        method = method or ("GET" if body is None else "POST")
        async with aiohttp.ClientSession() as session, session.request(
            method, self.url + path, json=body
        ) as response:
            return await response.json()

    async def batch(self, query: str = "") -> Any:
        """The next answer that is a batch, or says that there is none any more."""
        deadline = time.monotonic() + WAIT_S
        while True:
            answer = await self.call(f"/batch{query}")
            if answer["batch"] is not None or answer.get("done"):
                return answer
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)

    async def ledger(self, met: Callable[[Ledger], bool] = lambda _: True) -> Any:
        deadline = time.monotonic() + WAIT_S
        while not met(books := await read_ledger(self.bus, self.run, 30)):
            assert time.monotonic() < deadline, books.books()
            await asyncio.sleep(0.1)
        return books.books()[0]

    async def control(self) -> list[Any]:
        async with LogReader(self.bus, self.context.topic("control"), [0]) as reader:
            return [decode(raw.value, list(raw.headers))
                    async for records in reader.to_end(30) for raw in records]

    async def drain(self) -> None:
        self.context.draining.set()
        await asyncio.wait_for(self.task, WAIT_S)

    async def kill(self) -> None:
        """As near to a kill as one process gets: nothing is flushed or finished."""
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=WAIT_S)


def numbers(answer: Any) -> list[int]:
    return [fields["tokens"][0][2] for fields in answer["batch"]]


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


async def test_what_was_not_acknowledged_is_offered_again_whole_after_a_restart(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    run = config(prefix, tmp_path)
    async with topics_of(run, broker) as writer:
        await put(writer, run, *(group(n) for n in range(6)))
        first = Member(run, broker, "first")
        await first.up()
        await first.call("/register", REGISTRATION)
        before = await first.batch()
        assert before["redelivered"] is False
        await first.kill()
        second = Member(run, broker, "second")
        await second.up()
        assert (await second.call("/info"))["batch_size"] == BATCH  # no second /register
        again = await second.batch()
        assert again == {**before, "redelivered": True}
        assert await second.call("/batch") == {"batch": None}
        after = await second.batch()
        assert numbers(after) == [2, 3]
        assert (after["batch_id"], after["redelivered"], after["version"]) == (1, False, 1)
        assert (await second.ledger()).delivered == 2
        await second.drain()


async def test_acknowledged_but_not_in_the_ledger_is_made_good_at_the_next_start(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    run = config(prefix, tmp_path)
    async with topics_of(run, broker) as writer:
        await put(writer, run, *(group(n) for n in range(3)))
        control = f"{prefix}.r1.control"
        await writer.send(control, 0, PolicyVersion(version=0, implied=True))
        await writer.send(control, 0, Offered(batch_id=0, groups=[0, 2]))
        await writer.send(control, 0, Acked(batch_id=0))
        member = Member(run, broker)
        books = await member.ledger(lambda b: b.books()[0].delivered == 2)
        assert books.reward_sum == 2.0
        await member.up()
        await put(writer, run, group(3))
        answer = await member.batch()
        assert (numbers(answer), answer["batch_id"]) == ([1, 3], 1)
        await member.drain()


WORKER = """
import asyncio, os, signal, sys
import msgspec
from rollstream.services.sink.service import Sink
from rollstream.services.sink.trainer import TrainerLeaf
from rollstream.shared.bus import Bus
from rollstream.shared.runs import RunConfig
from rollstream.shared.service import RunContext

def dies_after(original):
    async def method(self, record):
        offset = await original(self, record)
        if type(record).__name__ == sys.argv[3]:
            os.kill(os.getpid(), signal.SIGKILL)
        return offset
    return method

TrainerLeaf._to_control = dies_after(TrainerLeaf._to_control)
TrainerLeaf._told = dies_after(TrainerLeaf._told)
run = msgspec.json.decode(sys.argv[1], type=RunConfig)
bus = Bus(sys.argv[2], "worker", session_timeout_ms=1500)
asyncio.run(Sink().attend(RunContext(run, run.stages[-1], bus)))
"""


@pytest.mark.parametrize("after", ["Offered", "Acked"])
async def test_killed_right_after_offering_or_acknowledging(
    broker: str, prefix: str, tmp_path: Path, after: str
) -> None:
    run = config(prefix, tmp_path)

    def train(url: str) -> None:
        client = TrainerClient(url)
        client.wait_until_up(WAIT_S)
        client.register(batch_size=BATCH)
        for _ in client.batches(wait_s=WAIT_S):
            pass

    async with topics_of(run, broker) as writer:
        await put(writer, run, *(group(n) for n in range(6)))
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER, msgspec.json.encode(run).decode(), broker, after
        )
        with pytest.raises(TrainerError):
            await asyncio.to_thread(train, f"http://127.0.0.1:{run.sink.port}")
        assert await asyncio.wait_for(worker.wait(), WAIT_S) == -9
        member = Member(run, broker)
        await member.up()
        answer = await member.batch()
        if after == "Offered":
            assert (numbers(answer), answer["redelivered"]) == ([0, 1], True)
        else:
            assert (numbers(answer), answer["redelivered"]) == ([2, 3], False)
            assert (await member.ledger()).delivered == 2
        await member.drain()


async def test_two_trainer_sinks_one_is_active(broker: str, prefix: str, tmp_path: Path) -> None:
    run = config(prefix, tmp_path)
    async with topics_of(run, broker) as writer:
        await put(writer, run, *(group(n) for n in range(4)))
        members = [Member(run, broker, "first"), Member(run, broker, "second")]
        deadline = time.monotonic() + WAIT_S
        while not (active := [m for m in members
                              if m.context.progress.state == "waiting for a trainer"]):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        await asyncio.sleep(2)  # a late rebalance may still move the role
        active = [m for m in members if m.context.progress.state == "waiting for a trainer"]
        other = next(m for m in members if m not in active)
        assert len(active) == 1
        assert other.context.progress.state == "standby"
        await active[0].call("/register", REGISTRATION)
        assert numbers(await active[0].batch()) == [0, 1]
        await active[0].drain()
        await other.up()
        answer = await other.batch()
        assert (numbers(answer), answer["redelivered"]) == ([0, 1], True)
        await other.drain()


async def test_a_sink_that_lost_its_role_unknowingly_stops_at_the_others_offer(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    run = config(prefix, tmp_path)
    async with topics_of(run, broker) as writer:
        await put(writer, run, *(group(n) for n in range(4)))
        member = Member(run, broker)
        await member.up()
        await member.call("/register", REGISTRATION)
        await writer.send(f"{prefix}.r1.control", 0, Offered(batch_id=0, groups=[2, 3]))
        with pytest.raises(Lost, match="offered by another sink"):
            await asyncio.wait_for(member.task, WAIT_S)
        again = Member(run, broker)
        await again.up()
        answer = await again.batch()
        assert (numbers(answer), answer["redelivered"]) == ([2, 3], True)
        await again.drain()


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


async def test_an_embedded_broker_started_anew_delivers_nothing_twice(
    broker: str, prefix: str, tmp_path: Path
) -> None:
    old = config(f"{prefix}a", tmp_path, log_id="old")
    async with topics_of(old, broker) as writer:
        await put(writer, old, *(group(n) for n in range(6)))
        member = Member(old, broker)
        await member.up()
        await member.call("/register", REGISTRATION)
        await member.batch("?ack=-1")
        await member.batch("?ack=0")
        await member.kill()
    new = config(f"{prefix}b", tmp_path, log_id="new")
    async with topics_of(new, broker) as writer:
        facts = await Sink().consider(new, new.stages[-1])
        assert facts["restored"] == [(0, 1)]
        member = Member(new, broker)
        books = await read_ledger(member.bus, new, 30)
        deadline = time.monotonic() + WAIT_S
        while books.ended_unissued("trainer") != [0, 1]:  # batch 1 was not acknowledged
            assert time.monotonic() < deadline
            books = await read_ledger(member.bus, new, 30)
        await member.up()
        await put(writer, new, *(group(n) for n in range(6)))
        answer = await member.batch()
        assert (numbers(answer), answer["batch_id"], answer["version"]) == ([2, 3], 1, 1)
        assert (await member.ledger()).delivered == 2
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
