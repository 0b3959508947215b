"""Who runs when: a queue by priority and arrival, a bounded batch, and the ends of sequences.

Everything here is synchronous and happens in one thread; `worker` gives it that thread.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from rollstream.services.engine.sequences import FinishReason, Sequence, TokenChoice


class Executor(Protocol):
    """Computes tokens for the sequences it has started."""

    def has_room(self, sequence: Sequence) -> bool: ...
    def repeats_running_work(self, sequence: Sequence) -> bool: ...
    def start(self, sequence: Sequence) -> None: ...
    def advance(
        self, running: Iterable[Sequence]
    ) -> list[tuple[Sequence, TokenChoice | None]]: ...
    def release(self, sequence: Sequence) -> None: ...


class Scheduler:
    """Continuous batching: sequences join and leave the batch at every step."""

    def __init__(
        self,
        executor: Executor,
        *,
        decode: Callable[[list[int], bool], str],
        eos_token: int,
        max_batch: int,
        max_model_len: int,
    ) -> None:
        self.version = "default"
        self.running: dict[Sequence, None] = {}
        self.waiting: dict[Sequence, tuple[int, int]] = {}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[FinishReason] = Counter()
        self._executor = executor
        self._decode = decode
        self._eos_token = eos_token
        self._max_batch = max_batch
        self._max_model_len = max_model_len
        self._arrivals = itertools.count()

    @property
    def idle(self) -> bool:
        """Nothing to do."""
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting[sequence] = (sequence.priority, next(self._arrivals))

    def abort(self, request_ids: set[str] | None = None) -> list[Sequence]:
        """Ends the sequences of these requests, all without names, as `abort`; returns them."""
        chosen = [
            s for s in [*self.running, *self.waiting]
            if request_ids is None or s.request_id in request_ids
        ]
        for sequence in chosen:
            self._finish(sequence, "abort")
        return chosen

    def fail(self) -> list[Sequence]:
        """Ends whatever is running as `error` (a step has raised); returns them."""
        chosen = list(self.running)
        for sequence in chosen:
            self._finish(sequence, "error")
        return chosen

    def step(self) -> list[Sequence]:
        """Lets one token happen wherever one can; returns the sequences that changed."""
        self._admit()
        changed = []
        for sequence, choice in self._executor.advance(self.running):
            if choice is None:
                self._finish(sequence, "length")
            else:
                sequence.append(choice, self.version)
                self.generation_tokens += 1
                self._finish_if_ended(sequence)
            changed.append(sequence)
        return changed

    def _admit(self) -> None:
        if len(self.running) >= self._max_batch:
            return
        for sequence in sorted(self.waiting, key=self.waiting.__getitem__):
            # Nobody overtakes one that waits for memory: a large request would never run.
            if len(self.running) >= self._max_batch or not self._executor.has_room(sequence):
                return
            if not self._executor.repeats_running_work(sequence):
                del self.waiting[sequence]
                self.running[sequence] = None
                self._executor.start(sequence)
                self.prompt_tokens += len(sequence.prompt)

    def _finish_if_ended(self, sequence: Sequence) -> None:
        sampling, token = sequence.sampling, sequence.output[-1]
        if token == self._eos_token and not sampling.ignore_eos:
            self._finish(sequence, "stop", ended_by_token=True)
        elif token in sampling.stop_token_ids:
            sequence.stop_reason = token
            self._finish(sequence, "stop", ended_by_token=True)
        elif (cut := self._stop_string(sequence)) is not None:
            sequence.text, sequence.stop_reason = cut
            self._finish(sequence, "stop")
        elif (
            len(sequence.output) >= sampling.max_tokens
            or len(sequence.prompt) + len(sequence.output) >= self._max_model_len
        ):
            self._finish(sequence, "length")

    def _stop_string(self, sequence: Sequence) -> tuple[str, str] | None:
        """The text before the earliest stop string, and that string."""
        if not sequence.sampling.stop:
            return None
        text = self._decode(sequence.output, sequence.sampling.skip_special_tokens)
        found = [(text.find(stop), stop) for stop in sequence.sampling.stop if stop in text]
        if not found:
            return None
        at, stop = min(found)
        return text[:at], stop

    def _finish(
        self, sequence: Sequence, reason: FinishReason, *, ended_by_token: bool = False
    ) -> None:
        if sequence in self.running:
            del self.running[sequence]
            self._executor.release(sequence)
        self.waiting.pop(sequence, None)
        if not isinstance(sequence.stop_reason, str):
            shown = sequence.output[:-1] if ended_by_token else sequence.output
            sequence.text = self._decode(shown, sequence.sampling.skip_special_tokens)
        self.finished[reason] += 1
        sequence.finish_reason = reason  # last: other threads read the rest once this is set
