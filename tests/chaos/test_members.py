"""Members come, go, hang and have nothing to do: nothing is lost or doubled, and nobody waits."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from reckoning import reckon
from rig import Engine, Rig, rig

from rollstream.services.cli.processes import Child
from rollstream.shared.records import Rollout
from rollstream.shared.runs import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

GROUPS, K = 40, 2
IN_FLIGHT = 16
SESSION_S = 6


@pytest.fixture
async def slow_head(tmp_path: Path):
    """One answer in forty takes 15 s, the others less than one."""
    answers = [{"text": f"It is {n}.", "delay_s": 15 if n == 7 else 0.5} for n in range(40)]
    engine = Engine(tmp_path / "scripted", answers)
    await engine.start()
    yield engine
    await engine.stop()


async def rows(made: Rig, **fields: object) -> RunConfig:
    return await made.run(
        "sft", "members", env="judge_env", env_args={"rows": GROUPS}, epochs=1, group_size=K,
        **{"max_in_flight": 32, **fields},
    )


def health_port(child: Child) -> int:
    for line in child.log.read_text().splitlines():
        if '"health_port"' in line:
            return int(json.loads(line)["health_port"])
    raise AssertionError(f"{child.log} names no port")


def ready(child: Child) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{health_port(child)}/readyz", timeout=5):
            return True
    except OSError:
        return False


async def test_a_member_that_hung_past_its_session_does_no_harm(
    broker: str, prefix: str, tmp_path: Path, slow_head: Engine
):
    """SIGSTOP for longer than the session, then SIGCONT: a zombie of each stage in turn."""
    async with rig(broker, prefix, tmp_path, slow_head.url) as made:
        made.judge()
        first = await made.services("sink", "scorer", "generator", "prompt-producer")
        for name in ("generator", "scorer", "sink"):
            await made.service(name)
        config = await rows(made, max_in_flight=8)
        for name in ("generator", "scorer", "sink"):
            process = first[name].process
            assert process is not None
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(SESSION_S + 4)
            process.send_signal(signal.SIGCONT)
        await made.done(config, timeout_s=200)
        found = await reckon(made, config, groups=GROUPS)
        assert (found.delivered, found.lost, found.doubled, found.torn) == (GROUPS, 0, 0, 0)


async def test_one_to_four_generators_and_back(
    broker: str, prefix: str, tmp_path: Path, slow_head: Engine, request: pytest.FixtureRequest
):
    """Work in flight survives, what has finished is not done again, a slow answer stops nobody."""
    async with rig(broker, prefix, tmp_path, slow_head.url) as made:
        made.judge()
        flags = ("--max-in-flight", str(IN_FLIGHT))
        for name in ("sink", "scorer", "generator", "prompt-producer"):
            await made.service(name, *flags)
        config = await rows(made, max_in_flight=16)
        await asyncio.sleep(2)
        more = [await made.service("generator", *flags) for _ in range(3)]
        await asyncio.sleep(9)
        for child in more:
            child.wanted = False
            assert child.process is not None
            child.process.terminate()
            await asyncio.sleep(1)
        await made.done(config, timeout_s=200)
        found = await reckon(made, config, groups=GROUPS)
        assert (found.delivered, found.lost, found.doubled, found.torn) == (GROUPS, 0, 0, 0)
        # The embedded broker keeps no commit metadata: a new owner can't know what an old one is
        # still at, and begins that again. What has *finished* is in the output in any case.
        embedded = "embedded" in request.node.name
        assert found.again <= (3 * IN_FLIGHT if embedded else 0)
        rollouts = [r for r in await made.records(config, "rollouts") if isinstance(r, Rollout)]
        slow = max(range(len(rollouts)), key=lambda at: rollouts[at].duration_s)
        assert rollouts[slow].duration_s >= 15
        for child in more:
            assert child.process is not None
            assert await asyncio.wait_for(child.process.wait(), 90) == 0


async def test_members_without_a_partition_are_healthy_and_take_over(
    broker: str, prefix: str, tmp_path: Path, slow_head: Engine
):
    async with rig(broker, prefix, tmp_path, slow_head.url) as made:
        made.judge()
        for name in ("sink", "scorer", "prompt-producer"):
            await made.service(name)
        generators = [await made.service("generator") for _ in range(3)]
        config = await rows(made, partitions=1, max_in_flight=8)
        await asyncio.sleep(12)
        assert [ready(child) for child in generators] == [True] * 3
        working = [child for child in generators if '"record"' in child.log.read_text()]
        assert len(working) == 1, "one partition has one reader"
        await made.kill(working[0])
        await made.done(config, timeout_s=200)
        others = [child for child in generators if child is not working[0]]
        assert any('"record"' in child.log.read_text() for child in others)
        found = await reckon(made, config, groups=GROUPS)
        assert (found.delivered, found.lost, found.doubled, found.torn) == (GROUPS, 0, 0, 0)


@pytest.mark.kafka
async def test_deleted_commits_are_rebuilt_from_the_log(
    real_kafka: str, prefix: str, tmp_path: Path, slow_head: Engine
):
    """The consumer groups of three stages are deleted in mid-run; nothing is generated again."""
    names = ("generator", "scorer", "sink")
    async with rig(real_kafka, prefix, tmp_path, slow_head.url) as made:
        made.judge()
        started = await made.services("sink", "scorer", "generator", "prompt-producer")
        config = await rows(made, max_in_flight=8)
        await made.filled(config, "rollouts", 20)
        for name in names:
            child = started[name]
            child.wanted = False
            assert child.process is not None
            child.process.terminate()
            await asyncio.wait_for(child.process.wait(), 90)
        await delete_groups(real_kafka, [f"{prefix}.members.sft.{n}" for n in (
            "generator", "scorer", "sink-dataset")])
        for name in names:
            await made.service(name)
        await made.done(config, timeout_s=200)
        found = await reckon(made, config, groups=GROUPS)
        assert found == (GROUPS, 0, 0, 0, 0)


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
