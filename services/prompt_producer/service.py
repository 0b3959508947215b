"""The prompt-producer as a service: single-active per run, others stand by."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from rollstream.shared.brokers.connection import client_options
from rollstream.shared.brokers.room import BrokerRoom
from rollstream.shared.bus import Bus
from rollstream.shared.environments.library import Library
from rollstream.shared.role import Active, run_active
from rollstream.shared.routes import Route
from rollstream.shared.runs import Refusal, RunConfig
from rollstream.shared.service import RunContext
from rollstream.shared.settings import ServiceSettings

from .done_rows import delivered_rows, row_hash
from .produce import produce
from .sources import Source, open_source


class PromptProducer:
    """Serves every run whose rows it can load."""

    name = "prompt-producer"
    consumes = None
    produces = "Prompt"

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._library = Library()
        self._broker = BrokerRoom(settings.broker_pid, settings.broker_memory_bytes)

    async def consider(self, run: RunConfig, route: Route) -> dict[str, Any]:
        """Rows and fingerprints of the run's sources. Raises Refusal."""
        sources = await self._open(run)
        return {
            "rows": [len(source.rows) for source in sources],
            "dataset_fingerprints": [source.dataset_fingerprint for source in sources],
            "fingerprints": {s.ref.id: s.ref.fingerprint for s in sources if s.ref.id},
        }

    async def attend(self, context: RunContext) -> None:
        run = context.run
        sources = await self._open(run)
        for declared, found in zip(run.environments, sources, strict=True):
            if declared.dataset_fingerprint not in ("", found.dataset_fingerprint):
                raise Refusal(
                    "dataset fingerprint", found.dataset_fingerprint[:12],
                    f"the run was made with {declared.dataset_fingerprint[:12]}: a changed dataset "
                    "is a new run",
                )

        async def hold_office(active: Active) -> None:
            await produce(context, sources, active, self._broker)

        await run_active(context, hold_office)

    async def close(self) -> None:
        """Nothing outlives a run here."""

    async def _open(self, run: RunConfig) -> list[Source]:
        sources = [
            await asyncio.to_thread(open_source, source, self._library)
            for source in run.environments
        ]
        if not run.exclude_done:
            return sources
        settings = self._settings
        bus = Bus(
            settings.brokers, f"{self.name}-rows-{os.getpid()}", client_options(settings.security)
        )
        done = await delivered_rows(bus, run)
        kept = [
            Source(source.ref, [row for row in source.rows if row_hash(row) not in done])
            for source in sources
        ]
        for source, declared in zip(kept, run.environments, strict=True):
            if not source.rows:
                name = declared.id or declared.dataset
                raise Refusal("exclude_done", run.exclude_done, f"it has done all rows of {name}")
        return kept
