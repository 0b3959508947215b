"""How many samples are being generated now, as the generators' own commits tell it.

A commit's hint holds which samples are finished (`shared/frontier.py`). Where a broker discards
hints, nothing is known to be finished: then everything that is outstanding counts as running, which
admits less, never more.
"""

from __future__ import annotations

import time
from typing import Self

from aiokafka.errors import KafkaError

from rollstream.shared.bus import Lost, start, stop
from rollstream.shared.commits import ask_commits
from rollstream.shared.frontier import decode_hint
from rollstream.shared.service import RunContext

ASK_EVERY_S = 1.0
ANSWER_S = 10.0


class Running:
    """Asks for the commits of whatever reads the run's prompts; an async context manager."""

    def __init__(self, context: RunContext) -> None:
        run = context.run
        self._run = run
        self._readers = [
            RunContext(run, route, context.bus)
            for route in run.stages if route.input == context.route.output
        ]
        self._admin = context.bus.admin()
        self._asked_s = 0.0
        self._finished = 0

    async def __aenter__(self) -> Self:
        try:
            await start(self._admin)
        except (KafkaError, TimeoutError) as error:
            raise Lost.because("could not reach the broker", error) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop(self._admin)

    async def finished_samples(self) -> int:
        """Distinct samples that are finished at every reader; asked for once a second at most.

        An older number where the broker gives no answer: it only admits less.
        """
        if time.monotonic() - self._asked_s >= ASK_EVERY_S:
            self._asked_s = time.monotonic()
            try:
                counts = [await self._count(reader) for reader in self._readers]
                self._finished = min(counts, default=0)
            except (KafkaError, TimeoutError, OSError):
                pass
        return self._finished

    async def _count(self, reader: RunContext) -> int:
        run = self._run
        commits = await ask_commits(self._admin, reader, range(run.partitions), ANSWER_S)
        hints = [decode_hint(commit.metadata) for commit in commits.values()]
        return sum(
            hint.seen.samples(run.group_size)
            for hint in hints if hint is not None and hint.log_id == run.log_id
        )
