"""Groups whose letter could not hold its inputs are put back from where these lie."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from making import run

from rollstream.services.cli.letters import read_letters
from rollstream.services.cli.put_back import put_back
from rollstream.shared.bus import Bus
from rollstream.shared.codec import decode, header_text
from rollstream.shared.log_reader import LogReader
from rollstream.shared.records import (
    DeadLetter,
    EnvRef,
    Failure,
    Input,
    Record,
    Redriven,
    Rollout,
    Row,
    Scored,
    Stop,
)
from rollstream.shared.runs import RunConfig
from rollstream.shared.topics import create, run_specs


async def left_outside(bus: Bus, prefix: str) -> RunConfig:
    """A run with one letter, whose two rollouts lie in their topic only."""
    config = run(prefix=prefix, partitions=1)
    admin = bus.admin()
    await admin.start()
    await create(admin, run_specs(prefix, "r", "rl", ["rollouts", "ledger", "dlq"], 1))
    await admin.close()
    writer = await bus.writer()
    inputs = []
    for i in range(2):
        rollout = Rollout(run="r", pipeline="rl", n=0, i=i, k=2, env=EnvRef("e"), stop=Stop.STOP,
                          row=Row(prompt=[]), completion=[{"role": "assistant", "content": f"{i}"}])
        inputs.append(Input(await writer.send(f"{prefix}.r.rl.rollouts", 0, rollout), None))
    await writer.send(f"{prefix}.r.rl.dlq", 0, DeadLetter(
        run="r", pipeline="rl", stage="scorer", n=0, topic=f"{prefix}.r.rl.rollouts", partition=0,
        offset=0, error=Failure("A", "b"), inputs=inputs,
    ))
    await writer.close()
    return config


async def written(bus: Bus, config: RunConfig, kind: str) -> Sequence[tuple[Record, str | None]]:
    async with LogReader(bus, f"{config.prefix}.r.rl.{kind}", [0]) as log:
        await log.rewind()
        return [
            (decode(record.value, list(record.headers)), header_text(list(record.headers), "to"))
            async for records in log.to_end(60) for record in records
        ]


async def test_what_the_letter_could_not_hold_is_read_where_it_lies(broker: str, prefix: str):
    bus = Bus(broker, "test")
    config = await left_outside(bus, prefix)
    assert await put_back(bus, config, await read_letters(bus, config), None) == 0
    group, to = (await written(bus, config, "rollouts"))[-1]
    assert isinstance(group, Scored)
    assert (to, group.redrives) == ("scorer", 1)
    assert [s.completion[0]["content"] for s in group.samples] == ["0", "1"]
    ((redriven, _),) = await written(bus, config, "ledger")
    assert msgspec.structs.asdict(redriven) == msgspec.structs.asdict(
        Redriven(n=0, redrives=1, leaves=["trainer"])
    )


@pytest.mark.kafka
async def test_what_is_gone_from_there_is_told_and_left_parked(
    real_kafka: str, kafka_admin: AIOKafkaAdminClient, prefix: str,
    capsys: pytest.CaptureFixture[str],
):
    bus = Bus(real_kafka, "test")
    config = await left_outside(bus, prefix)
    everything = {TopicPartition(f"{prefix}.r.rl.rollouts", 0): RecordsToDelete(-1)}
    await kafka_admin.delete_records(everything)
    assert await put_back(bus, config, await read_letters(bus, config), None) == 1
    assert "no longer holds offset 0" in capsys.readouterr().err
    assert not await written(bus, config, "ledger")
