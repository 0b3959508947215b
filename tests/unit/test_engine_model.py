"""The fast forward pass and everything built on it, held to the plain reference on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollstream.services.engine.executor import NumpyExecutor
from rollstream.services.engine.model import Chunk, KvCache, Model
from rollstream.services.engine.reference import reference_logprobs
from rollstream.services.engine.scheduler import Scheduler
from rollstream.services.engine.sequences import Sampling, Sequence
from rollstream.services.engine.weights import (
    BadWeights,
    Floats,
    ModelConfig,
    Weights,
    arrange,
    assemble,
    load_converted,
    load_safetensors,
    save_converted,
)

CONFIG = ModelConfig(
    layers=3, hidden=48, heads=6, kv_heads=2, head_dim=8, feed_forward=64, vocab=300, context=512,
    rms_eps=1e-5, rope_theta=10000, bos_token=1, eos_token=2,
)
TOLERANCE = 1e-4


def hf_tensors(seed: int) -> dict[str, Floats]:
    """Random weights under Hugging Face names, lively enough that every part matters."""
    rng = np.random.default_rng(seed)
    c = CONFIG
    rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def matrix(out: int, into: int) -> Floats:
        return (rng.standard_normal((out, into)) / np.sqrt(into)).astype(np.float32)

    def norm() -> Floats:
        return (1 + 0.3 * rng.standard_normal(c.hidden)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(c.vocab, c.hidden) * 2, "model.norm.weight": norm(),
    }
    for i in range(c.layers):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}self_attn.q_proj.weight": matrix(rows, c.hidden) * 2,
            f"{at}self_attn.k_proj.weight": matrix(kv_rows, c.hidden) * 2,
            f"{at}self_attn.v_proj.weight": matrix(kv_rows, c.hidden),
            f"{at}self_attn.o_proj.weight": matrix(c.hidden, rows),
            f"{at}mlp.gate_proj.weight": matrix(c.feed_forward, c.hidden),
            f"{at}mlp.up_proj.weight": matrix(c.feed_forward, c.hidden),
            f"{at}mlp.down_proj.weight": matrix(c.hidden, c.feed_forward),
            f"{at}input_layernorm.weight": norm(),
            f"{at}post_attention_layernorm.weight": norm(),
        }
    return tensors


def tiny(seed: int = 0) -> Weights:
    return arrange(CONFIG, assemble(CONFIG, hf_tensors(seed).get))


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, CONFIG.vocab, count).tolist()


def log_softmax(logits: Floats) -> Floats:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class Engine:
    """A scheduler over the tiny model, stepped by hand."""

    def __init__(self, weights: Weights, *, prefix_cache_bytes: int = 10**8, max_batch: int = 6,
                 kv_cache_bytes: int = 10**9) -> None:
        self.executor = NumpyExecutor(
            Model(weights, 512, threads=2), kv_cache_bytes=kv_cache_bytes,
            prefix_cache_bytes=prefix_cache_bytes, max_model_len=512, max_logprobs=20,
        )
        self.scheduler = Scheduler(
            self.executor, decode=lambda ids, _: str(ids), eos_token=2, max_batch=max_batch,
            max_model_len=512,
        )
        self.widest = 0

    def run(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)
        for _ in range(2000):
            if self.scheduler.idle:
                return
            self.scheduler.step()
            self.widest = max(self.widest, len(self.scheduler.running))
        raise AssertionError("the engine does not come to an end")


def sequence(prompt: list[int], seed: int = 0, scores: int | None = None, n: int = 8) -> Sequence:
    how = Sampling(
        max_tokens=n, ignore_eos=True, seed=seed, logprobs=3, prompt_logprobs=scores
    )
    return Sequence(f"r{seed}", 0, prompt, how)


def check(weights: Weights, done: Sequence) -> None:
    """Every sampled and every prompt logprob against a pass from scratch."""
    rows = reference_logprobs(weights, done.tokens)
    for t, choice in enumerate(done.choices, len(done.prompt) - 1):
        assert choice.logprob == pytest.approx(rows[t, choice.token], abs=TOLERANCE)
        best = np.sort(rows[t])[::-1][: len(choice.top)]
        np.testing.assert_allclose([p for _, p in choice.top], best, atol=TOLERANCE)
    scores, k = done.prompt_scores, done.sampling.prompt_logprobs
    assert (scores is None) == (k is None)
    if scores is not None:
        assert len(scores.own) == len(done.prompt)
        for t in range(1, len(done.prompt)):
            row = rows[t - 1]
            assert scores.own[t] == pytest.approx(row[done.prompt[t]], abs=TOLERANCE)
            best = np.sort(row)[::-1][: scores.top_logprobs.shape[1]]
            np.testing.assert_allclose(scores.top_logprobs[t], best, atol=TOLERANCE)
            np.testing.assert_allclose(row[scores.top_ids[t]], best, atol=TOLERANCE)


@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_of_many_sequences_in_one_call(threads: int) -> None:
    weights = tiny()
    model = Model(weights, 512, threads)
    texts = [tokens(n, seed) for seed, n in enumerate([1, 150, 7, 30, 2])]
    caches = [KvCache(CONFIG, 1) for _ in texts]
    at = [0] * len(texts)
    got: list[list[Floats]] = [[] for _ in texts]
    rng = np.random.default_rng(0)
    while any(a < len(text) for a, text in zip(at, texts, strict=True)):
        going = [i for i, text in enumerate(texts) if at[i] < len(text)]
        sizes = {i: int(rng.choice([1, 1, 2, 40])) for i in going}
        pieces = {i: texts[i][at[i] : at[i] + sizes[i]] for i in going}
        logits = model.logits(model.forward([Chunk(pieces[i], caches[i]) for i in going]))
        row = 0
        for i in going:
            got[i].append(logits[row : row + len(pieces[i])])
            row += len(pieces[i])
            at[i] += len(pieces[i])
    for text, rows in zip(texts, got, strict=True):
        expected = reference_logprobs(weights, text)
        np.testing.assert_allclose(log_softmax(np.concatenate(rows)), expected, atol=TOLERANCE)


@pytest.mark.parametrize("prefix_cache_bytes", [0, 60_000, 10**8])
def test_mixed_requests_over_shared_prefixes(prefix_cache_bytes: int) -> None:
    weights = tiny()
    engine = Engine(weights, prefix_cache_bytes=prefix_cache_bytes)
    shared = tokens(53, 1)
    first = [
        sequence([*shared, *tokens(length, seed)], seed, scores)
        for seed, (length, scores) in enumerate(
            [(9, None), (9, 4), (30, None), (0, 20), (0, None), (3, 0), (90, 2), (400, None)]
        )
    ]
    siblings = [sequence(first[0].prompt, 50 + i) for i in range(6)]
    engine.run(*first, *siblings)
    teacher = [sequence(s.tokens, 90, 8, n=1) for s in [*first[:3], *siblings]]
    engine.run(*teacher)
    for done in [*first, *siblings, *teacher]:
        check(weights, done)
    assert engine.widest > 3
    if prefix_cache_bytes == 10**8:
        assert all(s.cached_tokens == 62 for s in siblings)
        assert all(s.cached_tokens == len(s.prompt) - 1 for s in teacher)


def test_siblings_that_come_together_compute_their_prompt_once() -> None:
    engine = Engine(tiny())
    siblings = [sequence(tokens(30, 1), seed) for seed in range(5)]
    engine.run(*siblings)
    assert [s.cached_tokens for s in siblings] == [0, 30, 30, 30, 30]
    assert engine.widest == 5
    assert engine.executor.prefix_cache.hit_tokens == 120


def test_the_same_seed_gives_the_same_tokens_alone_and_in_company() -> None:
    alone, company = Engine(tiny()), Engine(tiny())
    one, same = sequence(tokens(20, 5), seed=7), sequence(tokens(20, 5), seed=7)
    other = sequence(tokens(20, 5), seed=8)
    alone.run(one)
    company.run(*[sequence(tokens(9 + i, i), seed=i) for i in range(5)], other, same)
    assert one.output == same.output != other.output
    again = sequence(tokens(20, 5), seed=7)
    company.run(again)
    assert again.output == one.output


def test_running_sequences_stay_within_the_memory_for_them() -> None:
    tokens_that_fit = 100
    engine = Engine(tiny(), kv_cache_bytes=CONFIG.kv_bytes_per_token * tokens_that_fit)
    waiting = [sequence(tokens(30, seed), seed) for seed in range(6)]  # 38 tokens each in the end
    engine.run(*waiting, sequence(tokens(300, 9), 9))
    assert engine.widest == 2


def test_new_weights_score_as_themselves_and_share_nothing_with_the_old(tmp_path: Path) -> None:
    old, new = tiny(0), tiny(1)
    engine = Engine(old)
    save_converted(tmp_path, CONFIG, assemble(CONFIG, hf_tensors(1).get))
    prompt = tokens(40, 3)
    half_way = sequence(prompt, 1, n=20)
    engine.scheduler.add(half_way)
    for _ in range(5):
        engine.scheduler.step()
    engine.executor.reload(tmp_path)
    engine.run()
    after = sequence(prompt, 2, 5)
    engine.run(after)
    check(new, after)
    assert after.cached_tokens == 0


def write_safetensors(file: Path, tensors: dict[str, Floats], dtype: str) -> None:
    header, blobs, at = {}, [], 0
    for name, array in tensors.items():
        if dtype == "BF16":
            blob = (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        else:
            blob = array.astype({"F32": np.float32, "F16": np.float16, "I8": np.int8}[dtype])
            blob = blob.tobytes()
        header[name] = {
            "dtype": dtype, "shape": array.shape, "data_offsets": [at, at + len(blob)]
        }
        blobs.append(blob)
        at += len(blob)
    head = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(blobs))


@pytest.mark.parametrize(("dtype", "error"), [("F32", 0), ("F16", 1e-3), ("BF16", 1e-2)])
def test_a_trainer_s_checkpoint_is_the_same_model(tmp_path: Path, dtype: str, error: float) -> None:
    tensors = hf_tensors(4)
    names = sorted(tensors)
    write_safetensors(tmp_path / "a.safetensors", {n: tensors[n] for n in names[:9]}, dtype)
    write_safetensors(tmp_path / "b.safetensors", {n: tensors[n] for n in names[9:]}, dtype)
    loaded, expected = load_safetensors(tmp_path, CONFIG), tiny(4)
    np.testing.assert_allclose(loaded.layers[1].qkv, expected.layers[1].qkv, rtol=error, atol=1e-6)
    np.testing.assert_allclose(loaded.head, expected.head, rtol=error, atol=1e-6)


def test_a_checkpoint_of_another_shape_or_type_is_refused(tmp_path: Path) -> None:
    tensors = hf_tensors(0)
    write_safetensors(tmp_path / "x.safetensors", tensors, "I8")
    with pytest.raises(BadWeights, match="is I8; write F32, F16 or BF16"):
        load_safetensors(tmp_path, CONFIG)
    del tensors["model.norm.weight"]
    write_safetensors(tmp_path / "x.safetensors", tensors, "F32")
    with pytest.raises(BadWeights, match=r"tensor model\.norm\.weight is missing"):
        load_safetensors(tmp_path, CONFIG)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadWeights, match=r"holds no \*\.safetensors file"):
        load_safetensors(tmp_path / "empty", CONFIG)


def test_a_converted_model_loads_as_it_was(tmp_path: Path) -> None:
    save_converted(tmp_path, CONFIG, assemble(CONFIG, hf_tensors(2).get))
    loaded, expected = load_converted(tmp_path), tiny(2)
    assert loaded.config == CONFIG
    for ours, theirs in zip(loaded.layers, expected.layers, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(mine, other)
    np.testing.assert_array_equal(loaded.head, expected.head)
