"""Every service says that it lives, whether it is ready, what it does, and its numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rig import Engine, page, rig

from rollstream.services.cli.up import SERVICES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


async def test_pages_of_all_services(broker: str, prefix: str, tmp_path: Path):
    engine = Engine(tmp_path / "engine", [{"text": "1 + 1 = 2"}, {"text": "no"}])
    await engine.start()
    try:
        async with rig(broker, prefix, tmp_path, engine.url) as made:
            children = await made.services()
            for child in children.values():
                await made.children.wait_for_line(child, '"event":"started"', 30)
            config = await made.run("sft", "pages", total_groups=4)
            await made.done(config)
            for name in SERVICES:
                child = children[name]
                assert (await page(child, "/livez"))[0] == 200
                status, text = await page(child, "/readyz")
                assert (status, json.loads(text)["ready"]) == (200, True), text
                attended: dict[str, Any] = json.loads((await page(child, "/statusz"))[1])
                stages = [key.partition("/")[2].partition(":")[0] for key in attended]
                assert stages == ([] if name == "teacher-distiller" else [name])
            metrics = {name: (await page(children[name], "/metrics"))[1] for name in SERVICES}
            assert _value(metrics["generator"], "rollstream_records_produced_total") == 16
            assert _value(metrics["scorer"], "rollstream_records_consumed_total") == 16
            assert _value(metrics["scorer"], "rollstream_records_produced_total") == 4
            assert _value(metrics["sink"], "rollstream_groups_ended_total") == 4
            assert 'stage="scorer"' in metrics["scorer"]
    finally:
        await engine.stop()


def _value(text: str, name: str) -> float:
    values = re.findall(rf"^{name}\{{[^}}]*\}} (\S+)", text, re.M)
    assert values, f"{name} is not in:\n{text}"
    return sum(map(float, values))
