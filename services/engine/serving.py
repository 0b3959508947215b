"""What the routes stand on: prompts in, finished sequences out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web

from rollstream.services.engine.bodies import ChatBody, TokenizeBody
from rollstream.services.engine.errors import ApiError
from rollstream.services.engine.prefix_cache import PrefixCache
from rollstream.services.engine.script import Script
from rollstream.services.engine.sequences import Sampling, Sequence
from rollstream.services.engine.tokenizer import TemplateError, Tokenizer
from rollstream.services.engine.worker import Ticket, Worker


@dataclass(slots=True, kw_only=True)
class Serving:
    """One served model."""

    model: str
    tokenizer: Tokenizer
    eos_token: int
    max_model_len: int
    max_logprobs: int
    max_waiting: int
    worker: Worker
    prefix_cache: PrefixCache | None
    """None in script mode, which computes nothing."""
    reload: Callable[[Path], None] | None
    script: Script | None
    started_s: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that isn't served here; none named is fine."""
        if name is not None and name != self.model:
            raise ApiError(
                f"The model `{name}` does not exist. This server has `{self.model}`.",
                param="model", status=404, kind="NotFoundError",
            )

    def max_tokens(self, prompt: list[int], wanted: int | None, *, param: str = "messages") -> int:
        """The output tokens to allow: those wanted, or all that fit. Raises ApiError."""
        if not prompt:
            raise ApiError("the prompt is empty", param=param)
        if (worst := max(prompt)) >= self.tokenizer.size:
            raise ApiError(f"Token id {worst} is out of vocabulary", param=param)
        room = self.max_model_len - len(prompt)
        if room < (1 if wanted is None else wanted):
            asked = 1 if wanted is None else wanted
            raise ApiError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"you requested {asked} output tokens and your prompt contains {len(prompt)} "
                f"input tokens, for a total of {len(prompt) + asked} tokens. Please reduce the "
                "length of the input prompt or the number of requested output tokens.",
                param=param,
            )
        return room if wanted is None else wanted

    def render(self, fields: ChatBody | TokenizeBody) -> str:
        """The chat template's text for the messages. Raises ApiError."""
        if fields.tools and not self.tokenizer.template_knows_tools:
            raise ApiError(f"the chat template of {self.model} knows no tools", param="tools")
        messages = [_plain(i, message) for i, message in enumerate(fields.messages or [])]
        try:
            return self.tokenizer.render(
                messages, tools=fields.tools, add_generation_prompt=fields.add_generation_prompt,
                **(fields.chat_template_kwargs or {}),
            )
        except TemplateError as error:
            raise ApiError(f"messages: {error}", param="messages") from error

    @contextlib.asynccontextmanager
    async def ticket(
        self,
        prompts: list[list[int]],
        sampling: list[Sampling],
        *,
        n: int,
        request_id: str,
        priority: int = 0,
        every_token: bool = False,
    ) -> AsyncIterator[Ticket]:
        """Submits n sequences a prompt; leaving before their end (the client has gone) aborts them.

        Raises ApiError 503 when too many wait already, and whatever the script says.
        """
        scheduler = self.worker.scheduler
        waiting = len(scheduler.waiting)
        if waiting and waiting + n * len(prompts) > self.max_waiting:
            raise ApiError(
                f"{waiting} sequences are waiting already (--max-waiting {self.max_waiting})",
                status=503, kind="ServiceUnavailableError",
            )
        sequences: list[Sequence] = []
        for prompt, how in zip(prompts, sampling, strict=True):
            for i in range(n):
                # Siblings share the prompt, and so its scores.
                wanted = how if i == 0 else replace(how, prompt_logprobs=None)
                scripted = await self._scripted(prompt) if how.max_tokens else None
                sequences.append(
                    Sequence(request_id, len(sequences), prompt, wanted, priority, scripted)
                )
        ticket = Ticket(sequences, every_token=every_token)
        self.worker.submit(ticket)
        try:
            yield ticket
        finally:
            if not ticket.done:
                self.worker.forget(request_id)

    async def finished(self, prompts: list[list[int]], sampling: list[Sampling],
                       *, n: int, request_id: str, priority: int = 0) -> list[Sequence]:
        """Runs n sequences a prompt to their end. Raises ApiError."""
        async with self.ticket(
            prompts, sampling, n=n, request_id=request_id, priority=priority
        ) as ticket:
            # waits: the executor ends every ticket, and a client that leaves cancels
            await ticket.wait()
        if any(s.finish_reason == "error" for s in ticket.sequences):
            raise ApiError(
                "the engine failed at this step; its log says why",
                status=500, kind="InternalServerError",
            )
        return ticket.sequences

    async def _scripted(self, prompt: list[int]) -> list[int] | None:
        if self.script is None:
            return None
        try:
            line = self.script.next(self.tokenizer.decode(prompt))
        except LookupError as error:
            raise ApiError(str(error), status=500, kind="InternalServerError") from error
        await asyncio.sleep(line.delay_s)
        if line.status is not None:
            raise ApiError(line.message, status=line.status, kind="ScriptedError")
        return [*self.tokenizer.encode(line.text), self.eos_token]


SERVING: web.AppKey[Serving] = web.AppKey("serving", Serving)


def request_id_of(request: web.Request, named: str | None) -> str:
    """The caller's id (header X-Request-Id, then the body's request_id), or a new one."""
    return request.headers.get("X-Request-Id") or named or uuid4().hex


def _plain(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one text. Raises ApiError."""
    where = f"messages[{number}]"
    if not isinstance(message.get("role"), str):
        raise ApiError(f"{where}.role: expected a text", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise ApiError(f"{where}.content: only text parts are supported", param="messages")
            texts.append(part["text"])
        content = "\n".join(texts)
    if not isinstance(content, str | None):
        raise ApiError(f"{where}.content: expected a text or a list of parts", param="messages")
    return message | {"content": content or ""}
