"""Members come, go, hang and have nothing to do: nothing is lost or doubled, and nobody waits."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from reckoning import reckon
from rig import Engine, Rig, page, rig, signalled, status

from rollstream.services.cli.processes import Child
from rollstream.shared.records import Rollout
from rollstream.shared.runs import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]

K = 2
IN_FLIGHT = 16
SLOW_N, SLOW_S = 7, 60
SESSION_S = 6
ANSWERS = [
    # The answers to one row take very long, the others little.
    {"match": f"Say {SLOW_N}.", "text": "At last.", "delay_s": SLOW_S},
    *({"text": f"It is {n}.", "delay_s": 1.5} for n in range(7)),
]


async def rows(made: Rig, groups: int, **fields: Any) -> RunConfig:
    return await made.run(
        "sft", "members", env="judge_env", env_args={"rows": groups}, epochs=1, group_size=K,
        **fields,
    )


async def partitions(child: Child) -> list[int]:
    return (await status(child)).get("partitions", [])


async def shared_out(made: Rig, config: RunConfig, members: list[Child]) -> None:
    """Wait until each has partitions and all have them once: each has learnt what it lost.

    The embedded broker, on a busy machine, may take minutes to let two members join at once.
    """
    deadline_s = time.monotonic() + 240
    while True:
        shares = [await partitions(member) for member in members]
        if all(shares) and sorted(p for share in shares for p in share) == [
            *range(config.partitions)
        ]:
            return
        assert time.monotonic() < deadline_s, f"{shares}\n{made.logs()}"
        await asyncio.sleep(0.2)


async def has_all(member: Child, config: RunConfig) -> None:
    """Wait until one has all partitions: the other is a member no more."""
    deadline_s = time.monotonic() + 60
    while len(await partitions(member)) < config.partitions:
        assert time.monotonic() < deadline_s, "the hung member's partitions went to nobody"
        await asyncio.sleep(0.2)


async def test_a_member_that_hung_past_its_session_does_no_harm(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    """SIGSTOP for longer than the session, then SIGCONT: a zombie of each stage in turn.

    It finds out that others have its partitions, joins again and gets some back.
    """
    groups = 60
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        made.judge()
        first = await made.services("sink", "scorer", "generator", "prompt-producer")
        second = {name: await made.service(name) for name in ("generator", "scorer", "sink")}
        config = await rows(made, groups, max_in_flight=8)
        for name, other in second.items():
            zombie = first[name]
            assert zombie.process is not None
            pid = zombie.process.pid
            signalled(zombie, signal.SIGSTOP)
            await asyncio.sleep(SESSION_S + 4)
            await has_all(other, config)
            signalled(zombie, signal.SIGCONT)
            await shared_out(made, config, [zombie, other])
            assert zombie.process.pid == pid, "it was started anew"
        assert (await made.books(config)).delivered < groups, "it was over before the last"
        await made.done(config, timeout_s=200)
        found = await reckon(made, config, groups=groups)
        assert (found.delivered, found.lost, found.doubled, found.torn) == (groups, 0, 0, 0)


async def test_one_to_four_generators_and_back(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine, request: pytest.FixtureRequest
):
    """Work in flight survives, what has finished is not done again, a slow answer stops nobody."""
    # The embedded broker keeps no commit metadata: less is admitted at a time; a new owner can't
    # know what an old one is still at: it begins that again, but nothing that has finished.
    embedded = "embedded" in request.node.name
    groups = 120 if embedded else 240
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        made.judge()
        flags = ("--max-in-flight", str(IN_FLIGHT))
        started = await made.services("sink", "scorer", "prompt-producer")
        generators = [await made.service("generator", *flags)]
        config = await rows(made, groups, max_in_flight=16)
        await made.filled(config, "rollouts", 4)
        generators += [await made.service("generator", *flags) for _ in range(3)]
        await shared_out(made, config, generators)
        leaving = [asyncio.create_task(made.leave(child)) for child in generators[1:]]
        await asyncio.sleep(1)
        assert (await made.books(config)).delivered < groups, "it was over before they left"
        assert await asyncio.gather(*leaving) == [0, 0, 0]
        await made.done(config, timeout_s=200)

        found = await reckon(made, config, groups=groups)
        assert (found.delivered, found.lost, found.doubled, found.torn) == (groups, 0, 0, 0)
        assert found.again <= (3 * IN_FLIGHT if embedded else 0)
        assert found.repeated == 0
        # The slow ones were at work all the time; the others went on beside them.
        rollouts = [(sent_s, record) for sent_s, record in await made.stamped(config, "rollouts")
                    if isinstance(record, Rollout)]
        slow_s = [sent_s for sent_s, record in rollouts if record.n == SLOW_N]
        beside = {record.n % config.partitions for sent_s, record in rollouts
                  if min(slow_s) - SLOW_S < sent_s < min(slow_s)}
        assert beside == {*range(config.partitions)}
        assert all(child.running for child in (*started.values(), generators[0]))


@pytest.mark.kafka
async def test_a_leaving_generator_finishes_beside_the_one_that_has_its_partitions(
    real_kafka: str, prefix: str, tmp_path: Path, scripted: Engine
):
    """What one answer keeps it at for a minute is not waited for by anything else."""
    groups = 60
    async with rig(real_kafka, prefix, tmp_path, scripted.url) as made:
        made.judge()
        await made.services("sink", "scorer", "prompt-producer")
        first = await made.service("generator", "--drain-s", str(SLOW_S + 30))
        config = await rows(made, groups, max_in_flight=16)
        await made.filled(config, "rollouts", SLOW_N * K + 4)
        other = await made.service("generator")
        leaving = asyncio.create_task(made.leave(first))
        await shared_out(made, config, [other])
        assert not leaving.done()
        await made.filled(config, "rollouts", (groups - 1) * K)
        assert not leaving.done(), "the slow answer came before all others"
        assert await leaving == 0
        await made.done(config, timeout_s=200)
        found = await reckon(made, config, groups=groups)
        assert found == (groups, 0, 0, 0, 0, 0)


async def test_members_without_a_partition_are_healthy_and_take_over(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    """Three generators for one partition: two have nothing to do until the third is killed."""
    groups = 20
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        made.judge()
        await made.services("sink", "scorer", "prompt-producer")
        generators = [await made.service("generator") for _ in range(3)]
        config = await rows(made, groups, partitions=1, max_in_flight=8)
        await made.filled(config, "rollouts", 10)
        assert [(await page(child, "/readyz"))[0] for child in generators] == [200] * 3
        working = [child for child in generators if await partitions(child)]
        assert len(working) == 1, "one partition has one reader"
        await made.kill(working[0])
        await made.done(config, timeout_s=200)
        others = [child for child in generators if child is not working[0]]
        assert any('"record"' in child.log.read_text() for child in others)
        found = await reckon(made, config, groups=groups)
        assert (found.delivered, found.lost, found.doubled, found.torn) == (groups, 0, 0, 0)
        assert found.repeated == 0


@pytest.mark.kafka
async def test_deleted_commits_are_rebuilt_from_the_log(
    real_kafka: str, prefix: str, tmp_path: Path, scripted: Engine
):
    """The consumer groups of three stages are deleted in mid-run; nothing is generated again."""
    names, groups = ("generator", "scorer", "sink"), 40
    async with rig(real_kafka, prefix, tmp_path, scripted.url) as made:
        made.judge()
        started = await made.services("sink", "scorer", "generator", "prompt-producer")
        config = await rows(made, groups, max_in_flight=8)
        await made.filled(config, "rollouts", 20)
        for name in names:
            assert await made.leave(started[name]) == 0
        await delete_groups(real_kafka, [f"{prefix}.members.sft.{n}" for n in (
            "generator", "scorer", "sink-dataset")])
        for name in names:
            await made.service(name)
        await made.done(config, timeout_s=200)
        found = await reckon(made, config, groups=groups)
        assert found == (groups, 0, 0, 0, 0, 0)


async def delete_groups(bootstrap: str, groups: list[str]) -> None:
    """By Kafka's own tool: aiokafka's admin client can't."""
    deadline_s = time.monotonic() + 60
    command = [
        shutil.which("java") or "java", "-cp", f"{os.environ['KAFKA_HOME']}/libs/*",
        "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
        "--bootstrap-server", bootstrap, "--delete",
        *(word for group in groups for word in ("--group", group)),
    ]
    while True:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await asyncio.wait_for(process.communicate(), 60)
        if b"successful" in said:
            return
        assert time.monotonic() < deadline_s, said.decode()
        await asyncio.sleep(1)
