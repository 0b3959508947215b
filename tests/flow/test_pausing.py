"""A server's refusal pauses the run that asked, in the server's words; nothing of it is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from rig import Engine, Rig, rig

from rollstream.shared.records import DeadLetter
from rollstream.shared.registry import read_registry, set_status
from rollstream.shared.runs import Run, Status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

K, ROWS = 2, 6
ANSWERS = [
    {"match": "Say 3.", "status": 401, "message": "no key, no answer"},
    *([{"match": "Say 3.", "text": "Three."}] * 12),
    {"match": "Say 7.", "status": 401, "message": "no key, no answer"},
    {"text": "Something."},
]


async def until(made: Rig, run: str, status: Status) -> Run:
    deadline_s = time.monotonic() + 60
    while True:
        found = (await read_registry(made.bus, made.prefix)).runs[run]
        if found.status is status:
            return found
        assert time.monotonic() < deadline_s, f"{run} is {found.status}\n{made.logs()}"
        await asyncio.sleep(0.3)


async def test_the_run_that_asked_is_paused_and_the_others_go_on(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        made.judge()
        await made.services("sink", "scorer", "generator", "prompt-producer")
        refused = await made.run("sft", "refused", env="judge_env", env_args={"rows": ROWS},
                                 epochs=1, group_size=K)
        paused = await until(made, "refused", Status.PAUSED)
        assert paused.state is not None
        assert paused.state.reason.startswith("generator: endpoint default: http://")
        assert paused.state.reason.endswith("answered 401: no key, no answer")
        assert "no key, no answer" in await made.command("runs", "list")

        other = await made.run("sft", "other", epochs=1, group_size=K, env_args={"num_train": 4})
        await made.done(other)
        await made.stands(other, delivered=4)
        assert (await made.books(refused)).delivered < ROWS

        await set_status(made.bus, prefix, "refused", Status.RUNNING, "the key is there now")
        await made.done(refused)
        await made.stands(refused, delivered=ROWS, parked=0, in_flight=0)
        letters = await made.records(refused, "dlq")
        assert not [letter for letter in letters if isinstance(letter, DeadLetter)]
        rollouts = await made.records(refused, "rollouts")
        assert all(rollout.error is None for rollout in rollouts)


async def test_a_paused_run_can_be_stopped(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    """Its server still says no; what is open ends as cancelled all the same."""
    rows = 8
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        made.judge()
        await made.services("sink", "scorer", "generator", "prompt-producer")
        config = await made.run("sft", "hopeless", env="judge_env", env_args={"rows": rows},
                                epochs=1, group_size=K)
        await until(made, "hopeless", Status.PAUSED)
        await made.stop(config)
        await made.done(config)
        books = await made.books(config)
        assert books.balanced
        assert books.in_flight == 0
        assert books.dropped["cancelled"] >= 1
