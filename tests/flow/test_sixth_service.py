"""A service of another package, and routes of a user's own, without an edit under services/."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rig import Engine, rig

from rollstream.services.cli.propose import propose
from rollstream.services.cli.run_settings import RunSettings, to_config
from rollstream.shared import routes
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.runs import Sampling, SinkSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "length_reward"
ROUTES = """
[[route]]
pipeline = "sft"
instance = "length-reward"
input = "scored"
output = "rewarded"

[[route]]
pipeline = "sft"
instance = "sink:dataset"
input = "rewarded"

[[route]]
pipeline = "sft"
instance = "scorer:strict"
input = "rollouts"
output = "strict"

[[route]]
pipeline = "sft"
instance = "sink:archive"
input = "strict"
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example package, installed beside this environment for the test's processes."""
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--target", str(target), str(EXAMPLE)],
        check=True, timeout=120, capture_output=True,
    )
    monkeypatch.setenv("PYTHONPATH", str(target))
    monkeypatch.syspath_prepend(str(target))
    return target


async def test_a_sixth_service_and_a_second_rubric(
    broker: str, prefix: str, tmp_path: Path, engine: Engine, installed: Path
):
    table = routes.load(tomllib.loads(ROUTES)["route"])
    async with rig(broker, prefix, tmp_path, engine.url) as made:
        await made.services("sink", "scorer", "generator", "prompt-producer")
        await made.service("length-reward")
        settings = RunSettings(
            run="six", env="two_digit_addition", model="smollm2-135m", partitions=4,
            sampling=Sampling(max_tokens=14), group_size=2, total_groups=3, prefix=prefix,
            sink=SinkSettings(out=str(tmp_path / "six")), include_messages=True,
        )
        config = await propose(made.bus, to_config("sft", settings, table), 90)
        await made.done(config)
        books = {b.leaf: b for b in (await read_ledger(made.bus, config, 60)).books()}
        assert {leaf: b.delivered for leaf, b in books.items()} == {"dataset": 3, "archive": 3}
        plain = {g.n: g for g in await made.records(config, "scored")}
        strict = {g.n: g for g in await made.records(config, "strict")}
        for group in await made.records(config, "rewarded"):
            before = plain[group.n].samples
            assert [s.reward for s in strict[group.n].samples] == [s.reward for s in before]
            for now, then in zip(group.samples, before, strict=True):
                tokens = now.usage.completion_tokens
                assert tokens > 0
                assert now.reward == pytest.approx(then.reward - 0.01 * tokens)
            assert sum(s.advantage for s in group.samples) == pytest.approx(0)
