"""A broken rubric parks its groups; repaired, they are put back and end as if nothing had been."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from rig import MODEL, Engine, Rig, rig

from rollstream.client import TrainerClient
from rollstream.services.cli.letters import Inputs, read_letters
from rollstream.services.cli.put_back import write_group
from rollstream.shared.bus import Writer
from rollstream.shared.records import DeadLetter, Kind
from rollstream.shared.runs import Filters, RunConfig, Status, Teacher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS, K = 6, 2
ANSWERS = [{"text": f"It is {n}."} for n in range(7)]
STRICT = [
    {"pipeline": "sft", "instance": "scorer:strict", "input": "scored", "output": "strict"},
    {"pipeline": "sft", "instance": "teacher-distiller", "input": "strict",
     "output": "distilled", "when": "teacher"},
]
SERVICES = ("sink", "scorer", "generator", "prompt-producer")


async def judged(made: Rig, **fields: Any) -> RunConfig:
    return await made.run("sft", "judged", env="judge_env", env_args={"rows": ROWS},
                          group_size=K, epochs=1, **fields)


async def test_parked_groups_are_redriven_after_the_run_has_ended(
    broker: str, admin: AIOKafkaAdminClient, prefix: str, tmp_path: Path, scripted: Engine,
    request: pytest.FixtureRequest,
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        steer = made.judge()
        (steer / "broken").touch()
        started = await made.services(*SERVICES)
        config = await judged(made)
        await made.done(config)
        books = await made.books(config)
        assert (books.parked, books.delivered, books.in_flight) == (ROWS, 0, 0)
        assert made.dataset(config) == []
        letters = [x for x in await made.records(config, "dlq") if isinstance(x, DeadLetter)]
        assert all(len(letter.inputs) == K and letter.inputs[0].key for letter in letters)
        listed = await made.command("dlq", "list", "judged")
        assert listed.count("parked") == ROWS
        assert "ZeroDivisionError: the rubric is broken" in listed
        assert "Say" in await made.command("dlq", "show", "judged", "0")

        # Still broken: they are parked again, and that is told.
        told = await made.command("dlq", "redrive", "judged", "--groups", "0-1")
        assert "put back 2 groups" in told
        await made.done(config)
        assert (await made.books(config)).parked == ROWS

        (steer / "broken").unlink()
        if "kafka" in request.node.name:
            # Days later: everything has expired but the letters, and all services are new.
            for child in started.values():
                await made.kill(child)
            expired = [TopicPartition(f"{prefix}.judged.sft.{kind}", p) for p in range(4)
                       for kind in ("prompts", "rollouts", "scored")]
            await admin.delete_records(dict.fromkeys(expired, RecordsToDelete(-1)))
            await made.services(*SERVICES)
        else:
            await made.kill(started["generator"])  # it probes its server when a run begins again
            await made.kill(started["scorer"])
            await made.service("scorer")
        asked = scripted.finished_requests()
        assert "would put back 6" in await made.command("dlq", "redrive", "judged", "--dry-run")
        assert (await made.books(config)).parked == ROWS
        none = await made.command("dlq", "redrive", "judged", "--error", "ValueError")
        assert "put back 0 groups" in none
        await made.command("dlq", "redrive", "judged", "--stage", "scorer", "--rate", "50")
        await made.done(config)

        books = await made.books(config)
        assert (books.parked, books.delivered, books.in_flight) == (0, ROWS, 0)
        assert books.balanced
        lines = made.dataset(config)
        assert len(lines) == ROWS
        assert all(line["scores"][0] == line["scores"][1] >= 1 for line in lines)
        assert len({json.dumps(line["messages"]) for line in lines}) == ROWS
        # Nothing was generated again: the rollouts' topic got only what was put back.
        assert await made.written(config, "prompts") == ROWS * K
        if "kafka" not in request.node.name:
            assert scripted.finished_requests() == asked
        assert await made.written(config, "rollouts") == ROWS * K + 2 + ROWS
        assert "put back 0 groups" in await made.command("dlq", "redrive", "judged")
        listed = await made.command("dlq", "list", "judged")
        assert (listed.count("ended delivered"), listed.count("superseded")) == (ROWS, 2)


async def test_some_groups_that_raise_stop_nobody_and_are_never_a_zero(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        steer = made.judge()
        (steer / "poison").write_text("1 4")
        await made.services(*SERVICES)
        config = await judged(made)
        await made.done(config)
        books = await made.books(config)
        assert (books.parked, books.delivered) == (2, ROWS - 2)
        assert all(min(line["scores"]) >= 1 for line in made.dataset(config))
        scored = await made.records(config, "scored")
        parked = [group for group in scored if group.kind is Kind.PARKED]
        assert {group.reason for group in parked} == {"Unscorable"}
        assert all(sample.reward is None for group in parked for sample in group.samples)


async def test_a_redrive_that_was_killed_in_between_is_completed_by_the_next(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        steer = made.judge()
        (steer / "broken").touch()
        await made.services(*SERVICES)
        config = await judged(made)
        await made.done(config)
        (steer / "broken").unlink()
        writer = await made.bus.writer()
        letters = {letter.letter.n: letter for letter in await read_letters(made.bus, config)}
        async with Inputs(made.bus, config) as inputs:
            with pytest.raises(Killed):
                await write_group(
                    cast(Writer, DiesAtLedger(writer)), config, letters[0],
                    await inputs.of(letters[0]),
                )
            # Neither gone from the books nor in flight: nobody attends a run that is done.
            await made.stands(config, parked=ROWS, in_flight=0)
            await write_group(writer, config, letters[1], await inputs.of(letters[1]))
        await writer.close()
        await made.stands(config, parked=ROWS - 1, in_flight=1)

        # Group 1 is on its way already, and nothing is put back for it: the run is opened, by the
        # command or, if it read the ledger only now, by the producer that had ended the run.
        told = await made.command("dlq", "redrive", "judged", "--groups", "1")
        assert "put back 0 groups" in told
        await made.done(config)
        # Group 0 lies there, too; nobody waits for it, so it may or may not have ended by then.
        books = await made.books(config)
        assert books.delivered in (1, 2)
        assert (books.parked, books.in_flight) == (ROWS - books.delivered, 0)
        two_at_once = await asyncio.gather(
            made.command("dlq", "redrive", "judged"), made.command("dlq", "redrive", "judged")
        )
        assert all("put back" in told for told in two_at_once)
        await made.done(config)
        await made.stands(config, parked=0, delivered=ROWS, in_flight=0)
        assert len(made.dataset(config)) == ROWS


class Killed(Exception):
    pass


class DiesAtLedger:
    """A writer of a process that is killed before it writes to the ledger."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def send(self, topic: str, *arguments: Any, **options: Any) -> int:
        if topic.endswith(".ledger"):
            raise Killed
        return await self._writer.send(topic, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


async def test_each_instance_gets_its_own_back_while_the_run_goes_on_and_while_it_finishes(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    """scorer -> scorer:strict -> teacher-distiller, one group parked at each scorer."""
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        (made.judge("strict") / "poison").write_text("4")
        await made.service("scorer", "--instance", "scorer:strict")
        (made.judge() / "poison").write_text("1")
        scorer = await made.service("scorer", "--instance", "scorer")
        others = await made.services("sink", "teacher-distiller", "generator", "prompt-producer")
        config = await judged(
            made, rows=STRICT, teacher=Teacher(endpoint=scripted.url, model=MODEL, top_k=1)
        )
        await made.filled(config, "prompts", ROWS * K)
        await made.kill(others["prompt-producer"])  # the run goes on: nobody ends it
        await made.stands(config, parked=2, delivered=ROWS - 2)
        letters = [x for x in await made.records(config, "dlq") if isinstance(x, DeadLetter)]
        assert sorted((x.n, x.stage) for x in letters) == [(1, "scorer"), (4, "scorer:strict")]
        asked = scripted.finished_requests()

        (made.folder / "strict" / "poison").unlink()
        strict = ("dlq", "redrive", "judged", "--stage", "scorer:strict")
        assert "put back 1 groups" in await made.command(*strict)
        await made.stands(config, parked=1, delivered=ROWS - 1)

        # The run is over but for the sink's last word when the other one comes back.
        await made.kill(scorer)
        await made.kill(others["sink"])
        await made.service("prompt-producer")
        await made.reaches(config, Status.FINISHING)
        (made.folder / "environments" / "poison").unlink()
        told = await made.command("dlq", "redrive", "judged")
        assert "put back 1 groups" in told
        assert "put back 0 groups" in await made.command("dlq", "redrive", "judged")
        # Every sample in flight is found at a stage.
        ledger = await made.command("ledger", "judged")
        assert "nowhere" not in ledger.lower()
        await made.service("scorer", "--instance", "scorer")
        await made.service("sink")
        await made.done(config)
        await made.stands(config, parked=0, delivered=ROWS, in_flight=0)
        assert len(made.dataset(config)) == ROWS
        # Only the teacher was asked again, once a sample.
        assert scripted.finished_requests() == asked + 2 * K
        distilled = [x for x in await made.records(config, "distilled") if x.kind is Kind.SCORED]
        assert sorted(group.n for group in distilled) == list(range(ROWS))
        assert all(group.distill_error is None for group in distilled)


async def test_reports_and_trainers_end_a_second_time(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        steer = made.judge()
        (steer / "poison").write_text("1 4")
        await made.services(*SERVICES)
        evaluation = await made.run("eval", "evaluated", env="judge_env", env_args={"rows": ROWS},
                                    group_size=K)
        trained = await made.run(
            "rl", "trained", env="judge_env", env_args={"rows": ROWS}, group_size=K,
            batch_size=2 * K, total_steps=1, filters=Filters(zero_variance="off"),
        )
        await asyncio.to_thread(train_one_batch, f"http://127.0.0.1:{trained.sink.port}")
        for config in (evaluation, trained):
            await made.done(config)
            assert (await made.books(config)).parked >= 1
        assert samples_of(evaluation) == (ROWS - 2) * K

        (steer / "poison").unlink()
        for config in (evaluation, trained):
            await made.command("dlq", "redrive", config.run)
            await made.done(config)
            books = await made.books(config)
            assert (books.parked, books.in_flight, books.balanced) == (0, 0, True)
        assert samples_of(evaluation) == ROWS * K
        assert (await made.books(evaluation)).delivered == ROWS
        # Its one batch was delivered before.
        books = await made.books(trained)
        assert (books.delivered, list(books.dropped)) == (2, ["not_needed"])


def train_one_batch(url: str) -> None:
    trainer = TrainerClient(url)
    trainer.wait_until_up()
    trainer.register(batch_size=2 * K)
    next(iter(trainer.batches(wait_s=90)))
    trainer.acknowledge()


def samples_of(config: RunConfig) -> int:
    return len((Path(config.sink.out) / "samples.jsonl").read_text().splitlines())
