"""Given answers instead of sampled ones, through the real tokenizer: for tests and rehearsals.

A script is a JSONL file; each line is `{"match": .., "text": ..}`, or with `status` and `message`
an error, each optionally after `delay_s`. The first line whose `match` occurs in the last user
message (no `match`: in any) decides; lines with the same `match` take turns, from the top again
after the last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from rollstream.services.engine.sequences import PromptScores, Sequence, TokenChoice

SCRIPTED_LOGPROB = -0.5
_LAST_USER = re.compile(r".*<\|im_start\|>user\n(.*?)(?:<\|im_end\|>|$)", re.DOTALL)


class ScriptLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One line of a script."""

    match: str = ""
    text: str = ""
    status: int | None = None
    message: str = "scripted error"
    delay_s: float = 0.0


class BadScript(ValueError):
    """The script can't be used; the message names the line and the field."""


class Script:
    """The lines of a script and how often each of them has been used."""

    def __init__(self, lines: list[ScriptLine]) -> None:
        if not lines:
            raise BadScript("holds no line")
        self._lines = lines
        self._used: Counter[str] = Counter()

    def next(self, prompt: str) -> ScriptLine:
        """The line for one more choice of this prompt (its whole text).

        Raises LookupError where no line fits.
        """
        found = _LAST_USER.match(prompt)
        said = found.group(1) if found else prompt
        first = next((line for line in self._lines if line.match in said), None)
        if first is None:
            raise LookupError(f"no line of the script matches {said[-80:]!r}")
        same = [line for line in self._lines if line.match == first.match]
        turn = self._used[first.match]
        self._used[first.match] += 1
        return same[turn % len(same)]


def load_script(file: Path) -> Script:
    """Raises BadScript, OSError."""
    lines = []
    for number, raw in enumerate(file.read_bytes().splitlines(), 1):
        if raw.strip():
            try:
                lines.append(msgspec.json.decode(raw, type=ScriptLine))
            except msgspec.MsgspecError as error:
                raise BadScript(f"line {number}: {error}") from error
    return Script(lines)


class ScriptExecutor:
    """Hands out each sequence's scripted tokens, one a step, every logprob -0.5.

    Times the temperature: a server whose logprobs are the sampler's own is known by their change.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def has_room(self, sequence: Sequence) -> bool:
        """Always: nothing is held."""
        return True

    def repeats_running_work(self, sequence: Sequence) -> bool:
        """Never: nothing is computed."""
        return False

    def start(self, sequence: Sequence) -> None:
        """Scores the prompt where that is wanted."""
        if (k := sequence.sampling.prompt_logprobs) is not None:
            count = len(sequence.prompt)
            tops = [self._top(token, k) for token in sequence.prompt]
            sequence.prompt_scores = PromptScores(
                np.full(count, SCRIPTED_LOGPROB, np.float32),
                np.ones(count, np.int32),
                np.array([[i for i, _ in top] for top in tops], np.int32).reshape(count, k),
                np.array([[p for _, p in top] for top in tops], np.float32).reshape(count, k),
            )

    def advance(self, running: Iterable[Sequence]) -> list[tuple[Sequence, TokenChoice | None]]:
        """The next scripted token of each."""
        return [(sequence, self._next(sequence)) for sequence in running]

    def release(self, sequence: Sequence) -> None:
        """Nothing was held."""

    def _next(self, sequence: Sequence) -> TokenChoice | None:
        if sequence.sampling.max_tokens == 0:
            return None
        script = sequence.scripted or [0]
        token = script[min(len(sequence.output), len(script) - 1)]
        logprob = SCRIPTED_LOGPROB * (sequence.sampling.temperature or 1.0)
        top = self._top(token, sequence.sampling.logprobs or 0, logprob)
        return TokenChoice(token, logprob, 1, top)

    def _top(
        self, token: int, k: int, logprob: float = SCRIPTED_LOGPROB
    ) -> list[tuple[int, float]]:
        others = [((token + i) % self._vocab, logprob - 1 - i) for i in range(1, k)]
        return [(token, logprob), *others][:k]
