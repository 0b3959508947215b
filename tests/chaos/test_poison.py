"""What can't be read doesn't stop the line: it is kept as evidence, and its slot closes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rig import Engine, rig

from rollstream.shared.records import DeadLetter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS, K = 8, 2
ANSWERS = [{"text": "It is 1.", "delay_s": 0.5}]


def headers(n: int, i: int | None = None) -> list[tuple[str, bytes]]:
    found = [("rs-group", str(n).encode()), ("rs-k", str(K).encode()), ("rs-env", b"judge_env")]
    return found + ([("rs-sample", str(i).encode())] if i is not None else [])


async def test_junk_in_every_topic(broker: str, prefix: str, tmp_path: Path, scripted: Engine):
    """Junk that is nobody's, and junk in the place of a sample and of a group, before the real."""
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        made.judge()
        started = await made.services("sink", "scorer", "generator", "prompt-producer")
        config = await made.run("sft", "poison", env="judge_env", env_args={"rows": ROWS},
                                group_size=K, epochs=1, max_in_flight=4)
        writer = await made.bus.writer()
        for kind in ("prompts", "rollouts", "scored"):
            topic = f"{prefix}.poison.sft.{kind}"
            await writer.send_bytes(topic, 0, b"", b"\x00 junk", [])
            await writer.send_bytes(topic, 1, b"", None, [("rs-group", b"many")])
        # Group 5 (partition 1) has not been issued yet: the first record of a sample counts.
        await writer.send_bytes(f"{prefix}.poison.sft.rollouts", 1, b"", b"{", headers(5, 0))
        await writer.send_bytes(f"{prefix}.poison.sft.scored", 2, b"", b"[1]", headers(6))
        await writer.close()
        await made.done(config)
        books = await made.books(config)
        assert books.balanced
        assert (books.in_flight, books.parked) == (0, 0)
        assert books.dropped == {"error": 1, "undecodable": 1}
        assert books.delivered == ROWS - 2 == len(made.dataset(config))
        letters = [x for x in await made.records(config, "dlq") if isinstance(x, DeadLetter)]
        kept = sorted((letter.stage, letter.error.type, letter.inputs[0].value or b"")
                      for letter in letters)
        assert kept == [
            ("generator", "undecodable", b""), ("generator", "undecodable", b"\x00 junk"),
            ("scorer", "undecodable", b""), ("scorer", "undecodable", b"\x00 junk"),
            ("scorer", "undecodable", b"{"),
        ]
        assert (await made.command("dlq", "list", "poison")).count("evidence") == 5
        assert "put back 0 groups" in await made.command("dlq", "redrive", "poison")
        assert all(child.running for child in started.values())
