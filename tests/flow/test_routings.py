"""rl, sft and eval at once through all five services, and what the rl records hold.

The alignment (design 4) is held against a plain forward pass of its own: uncached, unbatched.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rig import Engine, Rig, rig

from rollstream.services.engine.convert import default_cache, locate, prepare
from rollstream.services.engine.reference import reference_logprobs
from rollstream.shared.arrays import unpack
from rollstream.shared.records import Distilled, Prompt, Rollout, Scored
from rollstream.shared.runs import Filters, RunConfig, Teacher

CLIENT = Path(__file__).parents[2] / "examples" / "trainer_client.py"
TOP_K = 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def train(config: RunConfig, batches: int) -> str:
    """Take the run's batches with the example client; what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CLIENT), "--url", f"http://127.0.0.1:{config.sink.port}",
        "--batches", str(batches), "--batch-size", str(config.batch_size), "--wait-s", "60",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 200)
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.fixture
async def three_runs(broker: str, prefix: str, tmp_path: Path, engine: Engine):
    async with rig(broker, prefix, tmp_path, engine.url) as made:
        await made.services()
        runs = await asyncio.gather(
            made.run("rl", "rl", total_steps=2, batch_size=8,
                     teacher=Teacher("default", "smollm2-135m", TOP_K)),
            made.run("sft", "sft", total_groups=3, seed=1),
            made.run("eval", "eval", total_groups=3, group_size=2, seed=2),
        )
        await train(runs[0], 2)
        for config in runs:
            await made.done(config)
        yield made, *runs


async def test_the_three_routings_and_the_alignment(three_runs):
    made, rl, sft, evaluation = three_runs
    for config, groups in ((rl, 4), (sft, 3), (evaluation, 3)):
        books = await made.books(config)
        assert books.balanced
        assert (books.issued, books.delivered, books.in_flight) == (groups, groups, 0), books
    await _each_prompt_ends_in_one_rollout(made, sft)
    _dataset_is_whole(made, sft)
    _report_is_whole(evaluation)
    await _rl_is_aligned(made, rl)


async def _each_prompt_ends_in_one_rollout(made: Rig, config: RunConfig) -> None:
    prompts = await made.records(config, "prompts")
    rollouts = await made.records(config, "rollouts")
    scored = await made.records(config, "scored")
    assert all(isinstance(record, Prompt) for record in prompts)
    assert all(isinstance(record, Rollout) for record in rollouts)
    assert all(isinstance(record, Scored) for record in scored)
    issued = sorted((prompt.n, prompt.i) for prompt in prompts)
    assert issued == sorted({(r.n, r.i) for r in rollouts}) == [
        (n, i) for n in range(3) for i in range(4)
    ]
    assert sorted({group.n for group in scored}) == [0, 1, 2]


def _dataset_is_whole(made: Rig, config: RunConfig) -> None:
    lines = made.dataset(config)
    assert len(lines) == 3
    for line in lines:
        assert len(line["tokens"]) == len(line["scores"]) == len(line["messages"]) == 4
        assert all(score in (0.0, 1.0) for score in line["scores"])
    assert (Path(config.sink.out) / "dataset.parquet").stat().st_size > 0


def _report_is_whole(config: RunConfig) -> None:
    out = Path(config.sink.out)
    results = json.loads((out / "metrics.json").read_text())["results"]["all"]
    assert {"pass@1", "pass@2"} <= set(results)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 6
    assert results["pass@1"] == pytest.approx(np.mean([s["score"] for s in samples]))


async def _rl_is_aligned(made: Rig, config: RunConfig) -> None:
    from rollstream.services.engine.weights import load_converted

    weights = load_converted(prepare(locate("smollm2"), default_cache()))
    groups = await made.records(config, "distilled")
    assert len({group.n for group in groups}) == 4
    for group in groups:
        assert isinstance(group, Distilled)
        assert group.distill_error is None
        assert sum(s.advantage or 0 for s in group.samples) == pytest.approx(0, abs=1e-6)
        # One sample of each group: the reference takes about a second a sequence.
        sample = group.samples[group.n % group.k]
        assert sample.reward in (0.0, 1.0)
        (sequence,) = sample.sequences
        tokens = unpack(sequence.tokens)
        assert sequence.logprobs is not None
        mask, logprobs = unpack(sequence.mask).astype(bool), unpack(sequence.logprobs)
        length = len(tokens)
        assert mask.any()
        assert not mask[0]
        assert len(mask) == len(logprobs) == length
        assert (logprobs[~mask] == 0).all()

        plain = reference_logprobs(weights, tokens.tolist())
        own = plain[np.arange(length - 1), tokens[1:]]
        # T = 1 and no truncation: the sampler's own logprob is the model's.
        assert np.abs(logprobs[1:] - own)[mask[1:]].max() < 1e-4

        payload = sequence.distill
        assert payload is not None
        assert payload.k == TOP_K
        ids, top = unpack(payload.token_ids), unpack(payload.logprobs).astype(np.float64)
        assert ids.shape == top.shape == (length, TOP_K)
        assert (ids[0] == -1).all()
        assert np.abs(unpack(payload.own)[1:] - own).max() < 1e-4
        best = np.sort(plain[:-1], axis=1)[:, ::-1][:, :TOP_K]
        given = np.take_along_axis(plain[:-1], ids[1:], axis=1)
        # By rank, and each id's value its own: near ties may change places.
        assert np.abs(given - best).max() < 1e-4
        assert np.abs(top[1:] - best).max() < 0.01


async def test_two_rl_runs_at_once_do_not_mix(
    broker: str, prefix: str, tmp_path: Path, engine: Engine
):
    async with rig(broker, prefix, tmp_path, engine.url) as made:
        await made.services("sink", "scorer", "generator", "prompt-producer")
        runs = [
            await made.run(
                "rl", f"rl-{seed}", env_args={"seed": seed}, total_steps=1, batch_size=8,
                seed=seed, filters=Filters(zero_variance="off"),
            )
            for seed in (1, 2)
        ]
        await asyncio.gather(*(train(config, 1) for config in runs))
        for config in runs:
            await made.done(config)
        questions = []
        for config in runs:
            for kind in ("prompts", "rollouts", "scored"):
                assert {r.run for r in await made.records(config, kind)} == {config.run}
            scored = await made.records(config, "scored")
            questions.append({group.row.question for group in scored})
            assert (await made.books(config)).delivered == 2
        assert not questions[0] & questions[1]
