"""The trainer leaf over restarts, kills and rivals: nothing is lost, nothing delivered twice."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec
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
from rollstream.shared.bus import Lost
from rollstream.shared.client import TrainerClient, TrainerError
from rollstream.shared.control import Acked, Offered, PolicyVersion
from rollstream.shared.ledger_reader import read_ledger


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
