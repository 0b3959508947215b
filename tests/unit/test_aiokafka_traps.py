"""How our Kafka clients are set up, each against a known trap of aiokafka (its issue numbers)."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka.errors import KafkaError

from rollstream.shared import bus as bus_module
from rollstream.shared.assignor import assignor_for
from rollstream.shared.bus import Bus, start, stop


@pytest.fixture
def bus() -> Bus:
    return Bus("127.0.0.1:1", "me")


async def test_a_member_commits_by_hand_and_never_jumps(bus: Bus):
    """929, 933: what is committed is said explicitly; 1031: no position is ever chosen for us."""
    member = bus.member("g")
    assert member._enable_auto_commit is False
    assert member._auto_offset_reset == "none"
    assert bus.reader()._auto_offset_reset == "none"


async def test_a_member_with_nothing_to_do_stays(bus: Bus):
    """848, 720, 1187: who is thought idle leaves the group and never comes back."""
    member = bus.member("g")
    assert member._max_poll_interval_ms == 24 * 3600 * 1000
    assert member._rebalance_timeout_ms == 60_000
    assert member._heartbeat_interval_ms * 3 <= member._session_timeout_ms


async def test_a_members_partitions_are_placed_by_its_own_name(bus: Bus):
    """1126, 1175, 1176: no cooperative protocol, and the sticky assignor is unsafe."""
    [assignor] = bus.member("g")._partition_assignment_strategy
    assert assignor.name == "rollstream-rendezvous"
    assert assignor.metadata(["t"]).user_data == b"me"
    assert assignor_for("a") is not assignor_for("b"), "no state is shared between members"


async def test_a_member_is_made_when_it_is_started(bus: Bus):
    """764: a consumer that was made long before `start` hangs there: none is kept for later."""
    assert bus.member("g") is not bus.member("g")


async def test_an_answer_means_every_replica(monkeypatch: pytest.MonkeyPatch, bus: Bus):
    """aiokafka's producer is content with acks=1 when nothing is said; 966: sizes are checked."""
    made: dict[str, object] = {}

    class Producer:
        def __init__(self, **options: object) -> None:
            made.update(options)

        async def start(self) -> None: ...

    monkeypatch.setattr(bus_module, "AIOKafkaProducer", Producer)
    await bus.writer()
    assert made["acks"] == "all"
    assert made["max_request_size"] == bus_module.MAX_REQUEST_BYTES
    assert "compression_type" not in made


class Hanging:
    """A client whose brokers are gone."""

    stopped = False

    async def start(self) -> None:
        await asyncio.sleep(3600)

    async def stop(self) -> None:
        self.stopped = True
        await asyncio.sleep(3600)


async def test_a_client_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch):
    """1101, 659: `stop` may hang when brokers are gone; what could not start is stopped again."""
    monkeypatch.setattr(bus_module, "STOP_TIMEOUT_S", 0.05)
    client = Hanging()
    with pytest.raises(TimeoutError):
        await start(client, 0.05)
    assert client.stopped
    await stop(client)


async def test_a_broker_that_is_not_there_is_an_error_not_a_wait(bus: Bus):
    with pytest.raises(KafkaError):
        await start(bus.reader(), 10)
