"""Server-sent events: what is new of each sequence, as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from rollstream.services.engine.sequences import Sequence, TokenChoice
from rollstream.services.engine.tokenizer import Tokenizer
from rollstream.services.engine.worker import Ticket

_HALF_A_CHARACTER = "\ufffd"


class Delta(NamedTuple):
    """News of one sequence: tokens, and the text that they have settled."""

    sequence: Sequence
    choices: list[TokenChoice]
    text: str
    last: bool


class Stream:
    """One streamed response over one ticket."""

    def __init__(self, request: web.Request, ticket: Ticket, tokenizer: Tokenizer) -> None:
        self._request = request
        self._ticket = ticket
        self._tokenizer = tokenizer
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

    async def open(self) -> None:
        """Sends the headers."""
        await self._response.prepare(self._request)

    async def send(self, event: dict[str, Any]) -> None:
        """Sends one event."""
        await self._response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def close(self) -> web.StreamResponse:
        """Ends the stream as OpenAI's does."""
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def deltas(self) -> AsyncIterator[Delta]:
        """News of every sequence until all have ended; each ends with exactly one `last`."""
        told: dict[Sequence, tuple[int, str]] = dict.fromkeys(self._ticket.sequences, (0, ""))
        while told:
            for sequence in list(told):
                ended = sequence.finish_reason is not None  # first: nothing follows once it is set
                count, text = told[sequence]
                new = sequence.choices[count:]
                if not new and not ended:
                    continue
                settled = sequence.text if ended else self._settled(sequence)
                if not settled.startswith(text):
                    settled = text
                yield Delta(sequence, new, settled[len(text) :], ended)
                told[sequence] = (count + len(new), settled)
                if ended:
                    del told[sequence]
            if told:
                # waits: the executor ends every ticket, and a client that leaves cancels
                await self._ticket.changed.wait()
                self._ticket.changed.clear()

    def _settled(self, sequence: Sequence) -> str:
        """Text that later tokens won't change: no half character, no beginning of a stop string."""
        text = self._tokenizer.decode(
            list(sequence.output), skip_special=sequence.sampling.skip_special_tokens
        ).rstrip(_HALF_A_CHARACTER)
        held = max((len(stop) for stop in sequence.sampling.stop), default=1) - 1
        return text[: len(text) - held] if held else text
