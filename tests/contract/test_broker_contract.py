"""What our code relies on a broker for, over every broker that we support.

Where the embedded broker is known to differ, the test says how, so that a new version that behaves
better is noticed.
"""

import asyncio
import contextlib
import sys
import time

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import (
    MessageSizeTooLargeError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
)

from rollstream.shared import brokers, topics

SESSION_MS = 2000


@contextlib.asynccontextmanager
async def running(client):
    await client.start()
    try:
        yield client
    finally:
        await asyncio.wait_for(client.stop(), 20)


def producer(bootstrap, **options):
    return running(AIOKafkaProducer(
        bootstrap_servers=bootstrap, acks="all",
        **{"max_request_size": topics.MAX_MESSAGE_BYTES, **options},
    ))


def reader(bootstrap):
    return running(AIOKafkaConsumer(
        bootstrap_servers=bootstrap, group_id=None, enable_auto_commit=False,
        auto_offset_reset="none", fetch_max_wait_ms=100,
    ))


def member(bootstrap, group, reset="none"):
    return AIOKafkaConsumer(
        bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False,
        auto_offset_reset=reset, session_timeout_ms=SESSION_MS, heartbeat_interval_ms=300,
        fetch_max_wait_ms=100,
    )


@pytest.fixture
async def topic(admin, prefix):
    """A topic of four partitions."""
    name = f"{prefix}.r.rl.prompts"
    await topics.create(admin, [topics.TopicSpec(name, 4)])
    return name


async def send_batch(client, topic, partition, count, size=1):
    """`count` records in as few batches as the client makes of them; their offsets."""
    sent = [await client.send(topic, b"x" * size, partition=partition) for _ in range(count)]
    return [(await future).offset for future in sent]


async def read_to_end(consumer, starts, within_s=20.0):
    """The records from each start to the partition's end when this was called, and the ends."""
    consumer.assign(list(starts))
    for tp, offset in starts.items():
        consumer.seek(tp, offset)
    pending, ends, records = set(starts), {}, {tp: [] for tp in starts}
    deadline = time.monotonic() + within_s
    while pending:
        assert time.monotonic() < deadline, f"no end of {pending}"
        for tp, got in (await consumer.getmany(*pending, timeout_ms=100)).items():
            records[tp] += got
        for tp in list(pending):
            if tp not in ends and (high_water := consumer.highwater(tp)) is not None:
                ends[tp] = high_water
            if tp in ends and await consumer.position(tp) >= ends[tp]:
                pending.discard(tp)
    return records, ends


async def poll_until(consumer, done, within_s=30.0):
    """Poll, as a member must, until `done(records so far)`; the records."""
    records = []
    deadline = time.monotonic() + within_s
    while not done(records):
        assert time.monotonic() < deadline, f"not within {within_s} s, {len(records)} records"
        for got in (await consumer.getmany(timeout_ms=100)).values():
            records += got
    return records


async def test_a_record_comes_back_as_it_was_sent(broker, topic):
    headers = [("a", b"\x00\xff"), ("empty", b""), ("a", b"again")]
    body = bytes(range(256))
    async with producer(broker) as sender, reader(broker) as consumer:
        meta = await sender.send_and_wait(
            topic, body, key=b"r/5", partition=2, headers=headers, timestamp_ms=1_700_000_000_123
        )
        await sender.send_and_wait(topic, None, key=b"r/5", partition=2)
        records, _ = await read_to_end(consumer, {TopicPartition(topic, 2): 0})
    first, tombstone = records[TopicPartition(topic, 2)]
    assert (meta.partition, meta.offset) == (2, 0)
    assert (first.value, first.key, list(first.headers)) == (body, b"r/5", headers)
    assert (first.timestamp, first.offset) == (1_700_000_000_123, 0)
    assert tombstone.value is None


async def test_records_of_a_partition_keep_their_order(broker, topic):
    async with producer(broker, linger_ms=5) as sender, reader(broker) as consumer:
        for i in range(300):
            await sender.send(topic, str(i).encode(), partition=i % 3)
        await sender.flush()
        records, _ = await read_to_end(consumer, {TopicPartition(topic, p): 0 for p in range(3)})
    for p in range(3):
        got = records[TopicPartition(topic, p)]
        assert [int(r.value) for r in got] == list(range(p, 300, 3))
        assert [r.offset for r in got] == list(range(100))


async def test_three_megabytes_pass(broker, topic):
    async with producer(broker) as sender, reader(broker) as consumer:
        await send_batch(sender, topic, 0, 1, size=3_000_000)
        records, _ = await read_to_end(consumer, {TopicPartition(topic, 0): 0})
    assert len(records[TopicPartition(topic, 0)][0].value) == 3_000_000


@pytest.mark.kafka
async def test_kafka_refuses_what_is_larger_than_the_topic_takes(real_kafka, kafka_admin, prefix):
    name = f"{prefix}.r.rl.prompts"
    await topics.create(kafka_admin, [topics.TopicSpec(name, 1)])
    async with producer(real_kafka, max_request_size=8_000_000) as sender:
        with pytest.raises(MessageSizeTooLargeError):
            await send_batch(sender, name, 0, 1, size=5_000_000)
        assert await send_batch(sender, name, 0, 1) == [0], "the producer goes on"


async def test_read_to_the_end_of_empty_batched_and_single_partitions(broker, topic):
    tps = [TopicPartition(topic, p) for p in range(4)]
    async with producer(broker, linger_ms=20) as sender, reader(broker) as consumer:
        assert await send_batch(sender, topic, 1, 20) == list(range(20))
        for _ in range(5):
            await send_batch(sender, topic, 2, 1)
        for _ in range(3):
            await send_batch(sender, topic, 3, 7)
        records, ends = await read_to_end(consumer, dict.fromkeys(tps, 0))
        assert [ends[tp] for tp in tps] == [0, 20, 5, 21]
        assert [len(records[tp]) for tp in tps] == [0, 20, 5, 21]
        starts = dict(zip(tps, [0, 13, 5, 10], strict=True))
        records, ends = await read_to_end(consumer, starts)
        assert [[r.offset for r in records[tp]] for tp in tps] == [
            [], list(range(13, 20)), [], list(range(10, 21))
        ]
        await send_batch(sender, topic, 1, 4)
        _, ends = await read_to_end(consumer, {tps[1]: 24})
        assert ends == {tps[1]: 24}, "a new assign() asks for the end anew"


async def test_everything_acknowledged_before_is_before_the_end(broker, topic):
    acknowledged = [0, 0, 0, 0]

    async def load(sender):
        for _ in range(60):
            for p in range(3):
                offsets = await send_batch(sender, topic, p, 5, size=2000)
                acknowledged[p] = offsets[-1] + 1

    async with producer(broker, linger_ms=2) as sender, reader(broker) as consumer:
        loading = asyncio.create_task(load(sender))
        while not loading.done():
            before = list(acknowledged)
            records, ends = await read_to_end(
                consumer, {TopicPartition(topic, p): before[p] // 2 for p in range(4)}
            )
            for tp, got in records.items():
                assert ends[tp] >= before[tp.partition]
                offsets = [r.offset for r in got if r.offset < ends[tp]]
                assert offsets == list(range(before[tp.partition] // 2, ends[tp]))
        await loading


async def test_a_start_beyond_the_end_is_never_taken_for_the_end(broker, topic):
    """Kafka raises, the embedded broker is silent with the true end: position is beyond it."""
    tp = TopicPartition(topic, 0)
    async with producer(broker) as sender, reader(broker) as consumer:
        await send_batch(sender, topic, 0, 3)
        try:
            records, ends = await read_to_end(consumer, {tp: 7})
        except OffsetOutOfRangeError:
            return
        assert records == {tp: []}
        assert await consumer.position(tp) > ends[tp] == 3


async def test_no_committed_offset_is_an_error_not_a_jump(broker, topic, prefix):
    async with running(member(broker, f"{prefix}.g")) as consumer:
        consumer.subscribe([topic])
        with pytest.raises(NoOffsetForPartitionError):
            await poll_until(consumer, lambda records: False)


async def test_a_new_member_goes_on_at_the_committed_offset(broker, topic, prefix):
    tp, group = TopicPartition(topic, 1), f"{prefix}.g"
    async with producer(broker) as sender:
        await send_batch(sender, topic, 1, 10)
    async with running(member(broker, group, reset="earliest")) as consumer:
        consumer.subscribe([topic])
        await poll_until(consumer, lambda records: len(records) == 10)
        await consumer.commit({tp: 4})
        assert await consumer.committed(tp) == 4
    async with running(member(broker, group, reset="earliest")) as consumer:
        consumer.subscribe([topic])
        records = await poll_until(consumer, lambda records: len(records) >= 6)
    assert [r.offset for r in records] == [4, 5, 6, 7, 8, 9]


async def committed_metadata(bootstrap, group, tp):
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        found = await admin.list_consumer_group_offsets(group, partitions=[tp])
    finally:
        await admin.close()
    return found[tp]


async def test_commit_metadata_comes_back_or_is_empty(broker, topic, prefix, request):
    """Kafka keeps 4,096 characters of it; the embedded broker keeps the offset alone."""
    tp, group, hint = TopicPartition(topic, 0), f"{prefix}.g", "h" * 4096
    async with producer(broker) as sender:
        await send_batch(sender, topic, 0, 3)
    async with running(member(broker, group, reset="earliest")) as consumer:
        consumer.subscribe([topic])
        await poll_until(consumer, lambda records: len(records) == 3)
        await consumer.commit({tp: (2, hint)})
    found = await committed_metadata(broker, group, tp)
    assert found.offset == 2
    assert found.metadata == ("" if "embedded" in request.node.name else hint)


MEMBER = """
import asyncio, sys
from aiokafka import AIOKafkaConsumer
async def main(bootstrap, group, topic, session_ms):
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False,
        auto_offset_reset="earliest", session_timeout_ms=int(session_ms),
        heartbeat_interval_ms=300)
    await consumer.start()
    while True:
        await consumer.getmany(timeout_ms=100)
        if consumer.assignment():
            print(len(consumer.assignment()), flush=True)
asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_members_partitions_go_to_the_other(broker, topic, prefix):
    """Also join and share: two members hold two partitions each, after the kill one holds all."""
    group = f"{prefix}.g"
    async with running(member(broker, group, reset="earliest")) as consumer:
        consumer.subscribe([topic])
        await poll_until(consumer, lambda _: len(consumer.assignment()) == 4)
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MEMBER, broker, group, topic, str(SESSION_MS),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert other.stdout is not None
            reading = asyncio.create_task(other.stdout.readline())
            await poll_until(consumer, lambda _: reading.done())
            assert reading.result() == b"2\n"
            assert len(consumer.assignment()) == 2
        finally:
            other.kill()
            await other.wait()
        await poll_until(consumer, lambda _: len(consumer.assignment()) == 4)
        async with producer(broker) as sender:
            for p in range(4):
                await send_batch(sender, topic, p, 2)
        await poll_until(consumer, lambda records: len(records) == 8)


async def test_a_member_that_leaves_gives_its_partitions_back(broker, topic, prefix):
    group = f"{prefix}.g"
    async with running(member(broker, group, reset="earliest")) as consumer:
        consumer.subscribe([topic])
        await poll_until(consumer, lambda _: len(consumer.assignment()) == 4)
        leaver = member(broker, group, reset="earliest")
        leaver.subscribe([topic])
        joining = asyncio.create_task(leaver.start())
        await poll_until(consumer, lambda _: joining.done() and len(consumer.assignment()) == 2)
        leaving = asyncio.create_task(leaver.stop())
        await poll_until(consumer, lambda _: leaving.done() and len(consumer.assignment()) == 4)


@pytest.mark.slow
@pytest.mark.kafka
async def test_kafka_keeps_records_offsets_and_metadata_over_kill_9(tmp_path, prefix, real_kafka):
    """Needs `real_kafka` only to be skipped, with the reason, where there is none."""
    folder, name, group = tmp_path / "a run", f"{prefix}.r.rl.prompts", f"{prefix}.g"
    tp = TopicPartition(name, 0)
    broker = await asyncio.to_thread(brokers.start, "kafka", folder)
    bootstrap = broker.bootstrap
    try:
        admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await admin.start()
        await admin.create_topics([NewTopic(name, 1, 1)])
        await admin.close()
        async with producer(bootstrap) as sender:
            await send_batch(sender, name, 0, 50)
            async with running(member(bootstrap, group, reset="earliest")) as consumer:
                consumer.subscribe([name])
                await poll_until(consumer, lambda records: len(records) == 50)
                await consumer.commit({tp: (30, "hint")})
            broker.kill()
            assert not broker.alive()
            sending = asyncio.create_task(send_batch(sender, name, 0, 1))
            broker = await asyncio.to_thread(brokers.start, "kafka", folder)
            assert broker.bootstrap == bootstrap, "clients find it where it was"
            assert await asyncio.wait_for(sending, 30) == [50], "the live producer goes on"
        found = await committed_metadata(bootstrap, group, tp)
        assert (found.offset, found.metadata) == (30, "hint")
        async with reader(bootstrap) as consumer:
            records, _ = await read_to_end(consumer, {tp: 0})
        assert [r.offset for r in records[tp]] == list(range(51))
    finally:
        await asyncio.to_thread(broker.stop)
