"""Runs sequences on the numpy model: one step computes for all of them what comes next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollstream.services.engine.model import Chunk, KvCache, Model
from rollstream.services.engine.prefix_cache import (
    Block,
    PrefixCache,
    hidden_states,
    load_blocks,
)
from rollstream.services.engine.sampling import choose, row_batches, score_rows
from rollstream.services.engine.sequences import Sequence, TokenChoice, joined
from rollstream.services.engine.weights import (
    BadWeights,
    Floats,
    Weights,
    load_converted,
    load_safetensors,
)

STEP_TOKENS = 512
_WORTH_WAITING_TOKENS = 16


@dataclass(slots=True)
class _Run:
    """What a running sequence holds here."""

    cache: KvCache
    generator: np.random.Generator
    reserved_tokens: int
    weights_number: int
    hidden: list[Floats] = field(default_factory=list)
    prompt_done: bool = False


class NumpyExecutor:
    """Continuous batching over one model, with a prefix cache. Not thread-safe."""

    def __init__(
        self,
        model: Model,
        *,
        kv_cache_bytes: int,
        prefix_cache_bytes: int,
        max_model_len: int,
        max_logprobs: int,
    ) -> None:
        self.prefix_cache = PrefixCache(prefix_cache_bytes)
        self._model = model
        self._free_tokens = kv_cache_bytes // model.config.kv_bytes_per_token
        self._max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._runs: dict[Sequence, _Run] = {}
        self._weights_number = 0

    def has_room(self, sequence: Sequence) -> bool:
        """Whether there is memory for it, should it become as long as it may; one always may."""
        return not self._runs or self._tokens_at_most(sequence) <= self._free_tokens

    def repeats_running_work(self, sequence: Sequence) -> bool:
        """Whether a prompt in progress will soon be in the prefix cache, good for this one too."""
        prefilling = [other for other, run in self._runs.items() if not run.prompt_done]
        shared = max((_common(sequence.prompt, s.prompt) for s in prefilling), default=0)
        if shared < _WORTH_WAITING_TOKENS:
            return False
        known = sum(len(block.tokens) for block in self.prefix_cache.match(sequence.prompt))
        return shared - known >= _WORTH_WAITING_TOKENS

    def start(self, sequence: Sequence) -> None:
        """Takes it in, with whatever the prefix cache knows of its prompt."""
        blocks = self.prefix_cache.match(sequence.prompt)
        run = _Run(
            cache=KvCache(self._model.config, len(sequence.prompt)),
            generator=_generator(sequence),
            reserved_tokens=self._tokens_at_most(sequence),
            weights_number=self._weights_number,
        )
        load_blocks(blocks, run.cache)
        if blocks:
            run.hidden.append(hidden_states(blocks))
        self._free_tokens -= run.reserved_tokens
        self._runs[sequence] = run
        sequence.cached_tokens = run.cache.length
        self.prefix_cache.queried_tokens += len(sequence.prompt)
        self.prefix_cache.hit_tokens += run.cache.length

    def advance(self, running: Iterable[Sequence]) -> list[tuple[Sequence, TokenChoice | None]]:
        """One step for all; the sequences that got a token (None: they wanted none)."""
        running = list(running)
        self._compute(running)
        ready = [
            s for s in running
            if self._runs[s].cache.length == len(s.prompt) + len(s.output)
        ]
        self._finish_prompts([s for s in ready if not self._runs[s].prompt_done])
        sampled = [s for s in ready if s.sampling.max_tokens > 0]
        done: list[tuple[Sequence, TokenChoice | None]] = [
            (s, None) for s in ready if s.sampling.max_tokens == 0
        ]
        if sampled:
            last = np.stack([self._runs[s].hidden[-1][-1] for s in sampled])
            choices = choose(
                self._model.logits(last),
                [s.sampling for s in sampled],
                [self._runs[s].generator for s in sampled],
            )
            done += zip(sampled, choices, strict=True)
        return done

    def release(self, sequence: Sequence) -> None:
        """Lets it go; what it computed stays in the prefix cache."""
        run = self._runs.pop(sequence, None)
        if run is None:
            return
        self._free_tokens += run.reserved_tokens
        if run.hidden and run.weights_number == self._weights_number:
            hidden = np.concatenate(run.hidden)
            if len(hidden) == run.cache.length:  # not so where a step has failed half-way
                self.prefix_cache.insert(sequence.tokens[: len(hidden)], run.cache, hidden)

    def reload(self, path: Path) -> None:
        """New weights of the same shape: a Hugging Face folder or a converted one.

        Running sequences go on over the keys and values they have; the prefix cache starts empty.
        Raises BadWeights, OSError.
        """
        config = self._model.config
        if (path / "weights.npy").is_file():
            weights: Weights = load_converted(path)
        else:
            weights = load_safetensors(path, config)
        if weights.config != config:
            raise BadWeights(f"{path} holds a model of another shape")
        self._model.weights = weights
        self._weights_number += 1
        self.prefix_cache.clear()

    def _tokens_at_most(self, sequence: Sequence) -> int:
        wanted = len(sequence.prompt) + sequence.sampling.max_tokens
        return min(wanted, self._max_model_len)

    def _compute(self, running: list[Sequence]) -> None:
        """The layers for every token not yet computed, prompts in bites so nobody waits long."""
        left = STEP_TOKENS
        chosen: list[Sequence] = []
        chunks: list[Chunk] = []
        for sequence in running:
            run = self._runs[sequence]
            if run.prompt_done:
                tokens = sequence.output[-1:]
            else:
                tokens = sequence.tokens[run.cache.length :][:left]
                left -= len(tokens)
            if tokens:
                chosen.append(sequence)
                chunks.append(Chunk(tokens, run.cache))
        if not chunks:
            return
        hidden = self._model.forward(chunks)
        row = 0
        for sequence, chunk in zip(chosen, chunks, strict=True):
            end = row + len(chunk.tokens)
            self._runs[sequence].hidden.append(hidden[row:end].copy())
            row = end

    def _finish_prompts(self, sequences: list[Sequence]) -> None:
        """Shares the computed prompts, and scores those that want prompt logprobs."""
        to_score: list[tuple[Sequence, list[Block]]] = []
        for sequence in sequences:
            run = self._runs[sequence]
            run.prompt_done = True
            if run.weights_number != self._weights_number:
                run.weights_number = -1  # computed by two versions: never to be shared
            scored = sequence.sampling.prompt_logprobs is not None
            if run.weights_number < 0 and not scored:
                continue
            cache = self.prefix_cache if run.weights_number >= 0 else PrefixCache(0)
            blocks = cache.insert(sequence.prompt, run.cache, np.concatenate(run.hidden))
            if scored:
                to_score.append((sequence, blocks))
        if to_score:
            self._score([blocks for _, blocks in to_score])
        for sequence, blocks in to_score:
            parts = [block.scores for block in blocks if block.scores is not None]
            sequence.prompt_scores = joined(parts)

    def _score(self, chains: list[list[Block]]) -> None:
        """Fills in the scores of all blocks that have none; each only once, in few products."""
        missing: dict[int, Block] = {}
        rows: list[Floats] = []
        for chain in chains:
            before = np.zeros((1, self._model.config.hidden), np.float32)
            for block in chain:
                if block.scores is None and id(block) not in missing:
                    missing[id(block)] = block
                    rows.append(np.concatenate([before, block.hidden[:-1]]))
                before = block.hidden[-1:]
        if not missing:
            return
        hidden = np.concatenate(rows)
        targets = np.array([token for block in missing.values() for token in block.tokens])
        scores = joined(
            [
                score_rows(self._model.logits(hidden[batch]), targets[batch], self._max_logprobs)
                for batch in row_batches(len(hidden))
            ]
        )
        row = 0
        for block in missing.values():
            end = row + len(block.tokens)
            block.scores = scores.rows(row, end)
            row = end


def _generator(sequence: Sequence) -> np.random.Generator:
    seed = sequence.sampling.seed
    return np.random.default_rng(None if seed is None else [abs(seed), seed < 0, sequence.index])


def _common(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))
