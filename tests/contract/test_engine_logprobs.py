"""The engine's numerical promise, over real HTTP with the real model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_server import MODEL, Client, addition

TOLERANCE = 1e-4
MEAN_BF16, MOST_BF16 = 0.05, 0.25

# In a process of its own: one product thread there, however many this one has.
REFERENCE = """
import json, sys
from pathlib import Path
import numpy as np
from rollstream.services.engine.reference import reference_logprobs
from rollstream.services.engine.weights import load_converted
weights = load_converted(Path(sys.argv[1]))
rows = [reference_logprobs(weights, s).astype(np.float32) for s in json.load(sys.stdin)]
np.savez(sys.argv[2], *rows)
"""


async def test_mixed_concurrent_requests_equal_a_forward_pass_from_scratch(
    engine: Client, folder: Path, tmp_path: Path
) -> None:
    """Sampled logprobs and the teacher's top k, through batches and the prefix cache."""
    hits = await engine.metric("prefix_cache_hits_total")
    common = {"max_tokens": 14, "logprobs": True, "top_logprobs": 4, "return_token_ids": True}
    asked = [
        engine.chat(messages=addition(23, 45), n=2, seed=1, **common),
        engine.chat(messages=addition(11, 38), seed=2, prompt_logprobs=3, **common),
        engine.chat(messages=addition(23, 45), temperature=0.5, seed=3, **common),
        engine.chat(messages=addition(23, 45), temperature=2.0, top_k=7, seed=4, **common),
        engine.chat(seed=5, ignore_eos=True, top_p=0.7, **(common | {"max_tokens": 25})),
        engine.chat(temperature=0, **common),
    ]
    answers = await asyncio.gather(*asked)
    sequences = [
        (answer["prompt_token_ids"], choice["token_ids"])
        for answer in answers for choice in answer["choices"]
    ]
    teacher = await asyncio.gather(
        *(
            engine.post("/v1/completions", model=MODEL, prompt=prompt + output, max_tokens=1,
                        temperature=0, prompt_logprobs=8)
            for prompt, output in sequences
        )
    )
    assert await engine.metric("prefix_cache_hits_total") - hits > 600
    rows = reference([p + o for p, o in sequences], folder, tmp_path / "rows.npz")
    cuts = [(1, 0, 1), (1, 0, 1), (0.5, 0, 1), (2, 7, 1), (1, 0, 0.7), (1, 0, 1)]
    for answer, cut in zip(answers, cuts, strict=True):
        prompt = answer["prompt_token_ids"]
        for choice in answer["choices"]:
            check_sampled(prompt, choice, rows[tuple(prompt + choice["token_ids"])], *cut)
    asked_by_student = answers[1]
    prompt, output = asked_by_student["prompt_token_ids"], sequences[2][1]
    check_prompt(prompt, asked_by_student["prompt_logprobs"], rows[tuple(prompt + output)], k=3)
    for (prompt, output), answer in zip(sequences, teacher, strict=True):
        scored = answer["choices"][0]["prompt_logprobs"]
        check_prompt(prompt + output, scored, rows[tuple(prompt + output)], k=8)


async def test_a_server_in_bf16_is_close_to_a_forward_pass(
    both: Client, folder: Path, tmp_path: Path
) -> None:
    """What a trainer may count on from vLLM; the engine's own promise is the test above.

    Sampled logprobs at each temperature as the sampler had them, and the teacher's own and best
    tokens, against float32.
    """
    asked = [(1.0, 0), (0.5, 0), (2.0, 7)]
    answers = await asyncio.gather(*(
        both.chat(messages=addition(a, b), temperature=temperature, top_k=top_k or -1, seed=a,
                  max_tokens=14, logprobs=True, top_logprobs=1, return_token_ids=True)
        for temperature, top_k in asked for a, b in [(23, 45), (11, 38), (34, 19), (12, 12)]
    ))
    cuts = [cut for cut in asked for _ in range(4)]
    sequences = [a["prompt_token_ids"] + a["choices"][0]["token_ids"] for a in answers]
    rows = reference(sequences, folder, tmp_path / "rows.npz")
    off, kept = [], 0
    for answer, sequence, (temperature, top_k) in zip(answers, sequences, cuts, strict=True):
        choice, start = answer["choices"][0], len(answer["prompt_token_ids"])
        for t, entry in enumerate(choice["logprobs"]["content"]):
            policy = rows[tuple(sequence)][start - 1 + t] / temperature
            likely = np.argsort(-policy)[: top_k or None]
            kept += choice["token_ids"][t] in likely
            policy = policy - np.log(np.exp(policy[likely]).sum())
            off.append(abs(entry["logprob"] - policy[choice["token_ids"][t]]))
    assert np.mean(off) <= MEAN_BF16
    assert kept >= 0.98 * len(off), "sampled from beyond the top k"

    teacher_off, agree = [], []
    for k in (0, 1, 8, 20):
        scored = (await both.post(
            "/v1/completions", model=MODEL, prompt=sequences[0], max_tokens=1, temperature=0,
            prompt_logprobs=k,
        ))["choices"][0]["prompt_logprobs"]
        assert (len(scored), scored[0]) == (len(sequences[0]), None)
        for t, row in list(enumerate(scored))[1:]:
            ours, token = rows[tuple(sequences[0])][t - 1], sequences[0][t]
            ranks = {entry["rank"]: int(token) for token, entry in row.items()}
            assert len(row) in (max(k, 1), k + 1)
            assert set(range(1, k + 1)) <= set(ranks)
            teacher_off.append(abs(row[str(token)]["logprob"] - ours[token]))
            if k:
                agree.append(ranks[1] == int(ours.argmax()))
    print(f"{both.backend}: sampled off by {np.mean(off):.4f} (most {max(off):.4f}), prompt by "
          f"{np.mean(teacher_off):.4f} ({max(teacher_off):.4f}), same best {np.mean(agree):.3f}")
    assert np.mean(teacher_off) <= MEAN_BF16
    assert max(teacher_off) <= MOST_BF16
    assert np.mean(agree) >= 0.9


def reference(
    sequences: list[list[int]], folder: Path, file: Path
) -> dict[tuple[int, ...], np.ndarray]:
    """Every sequence's log-probabilities by the plain forward pass."""
    subprocess.run(
        [sys.executable, "-c", REFERENCE, str(folder), str(file)], input=json.dumps(sequences),
        text=True, check=True, timeout=100, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    with np.load(file) as rows:
        return {tuple(s): rows[f"arr_{i}"] for i, s in enumerate(sequences)}


def check_sampled(
    prompt: list[int], choice: Any, rows: np.ndarray, temperature: float, top_k: int, top_p: float
) -> None:
    """Each sampled token's logprob under the sampler's own distribution."""
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    for t, (token, entry) in enumerate(zip(choice["token_ids"], content, strict=True)):
        policy = rows[len(prompt) - 1 + t] / temperature
        order = np.argsort(-policy)
        kept = order[:top_k] if top_k else order
        policy = policy - np.log(np.exp(policy[kept]).sum())
        mass_before = np.cumsum(np.exp(policy[kept])) - np.exp(policy[kept])
        kept = kept[mass_before < top_p]
        policy = policy - np.log(np.exp(policy[kept]).sum())
        assert token in kept
        assert entry["logprob"] == pytest.approx(policy[token], abs=TOLERANCE)
        best = sorted((e["logprob"] for e in entry["top_logprobs"]), reverse=True)[:4]
        kept_best = policy[kept][: len(best)]
        np.testing.assert_allclose(best[: len(kept_best)], kept_best, atol=TOLERANCE)


def check_prompt(tokens: list[int], scored: list[Any], rows: np.ndarray, k: int) -> None:
    """Entry t is the model's view of token t: the token itself first, and the k best by rank."""
    assert (len(scored), scored[0]) == (len(tokens), None)
    for t in range(1, len(tokens)):
        row, own = rows[t - 1], str(tokens[t])
        assert next(iter(scored[t])) == own
        by_rank = {entry["rank"]: entry["logprob"] for entry in scored[t].values()}
        assert set(range(1, k + 1)) <= set(by_rank)
        best = np.sort(row)[::-1][:k]
        np.testing.assert_allclose([by_rank[i] for i in range(1, k + 1)], best, atol=TOLERANCE)
        assert scored[t][own]["logprob"] == pytest.approx(row[tokens[t]], abs=TOLERANCE)
        assert scored[t][own]["rank"] == pytest.approx((row >= row[tokens[t]]).sum(), abs=2)


async def test_the_same_request_gives_the_same_tokens(both: Client) -> None:
    body = {"max_tokens": 12, "seed": 9, "temperature": 1.5, "return_token_ids": True}
    first, other = await both.chat(**body), await both.chat(**(body | {"seed": 10}))
    again = await both.chat(**body)
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert other["choices"][0]["token_ids"] != first["choices"][0]["token_ids"]
