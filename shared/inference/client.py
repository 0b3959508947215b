"""The client through which generator and teacher-distiller talk to inference servers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import structlog

from rollstream.shared.inference import (
    bodies,
    continuation,
    dialects,
    text_offsets,
    vocabulary,
)
from rollstream.shared.inference.endpoints import normalise
from rollstream.shared.inference.faults import DeadlinePassed, Lessons, learn
from rollstream.shared.inference.probe import probe
from rollstream.shared.inference.transport import Due, Reply, Transport
from rollstream.shared.inference.types import (
    Capabilities,
    Completion,
    ContextOverflow,
    InferenceError,
    PromptLogprobs,
)
from rollstream.shared.inference.weights import WeightRoutes
from rollstream.shared.policy import version_of
from rollstream.shared.records import Message, VersionSpan

log = structlog.get_logger(__name__)

FINGERPRINT_S = 30.0
_REASONING = ("reasoning", "reasoning_content")


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """What `chat` was asked for; `until` is a time.monotonic()."""

    messages: list[Message]
    model: str
    sampling: dict[str, Any]
    tools: list[dict[str, Any]] | None
    seed: int | None
    sticky: str
    until: float
    max_attempts: int


class InferenceClient:
    """One inference service (one or several equal servers), in the dialect it is found to speak.

    Use it as an async context manager. Durations are in seconds from the call on. To cancel a call
    cuts its connection, which makes the server abort the request.
    """

    def __init__(
        self, urls: list[str], *, api_key: str | None, max_concurrent: int,
        max_tokens_in_flight: int = 0, request_timeout_s: float,
    ) -> None:
        self._transport = Transport(
            [normalise(url) for url in urls],
            api_key=api_key, max_concurrent=max_concurrent,
            max_tokens_in_flight=max_tokens_in_flight, request_timeout_s=request_timeout_s,
        )
        self.weights = WeightRoutes(self._transport)
        self.due: Due | None = None
        """Which weights a server must have to be asked for samples; set by whoever follows them."""
        self._request_timeout_s = request_timeout_s
        self._found: dict[str | None, Capabilities] = {}
        self._asking = asyncio.Lock()
        self._lessons: dict[str, Lessons] = {}
        self._first_texts: dict[tuple[str, int], str] = {}

    async def __aenter__(self) -> Self:
        await self._transport.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._transport.close()

    def in_flight(self) -> dict[str, int]:
        """Requests under way per URL."""
        return self._transport.in_flight()

    @property
    def allowed_requests(self) -> int:
        """How many requests may be under way now."""
        return self._transport.allowed_requests

    def dropped_parameters(self, model: str) -> frozenset[str]:
        """Sampling parameters that the server refused for this model, and that are not sent."""
        return self._lessons_of(model).dropped

    async def wait_until_up(self, timeout_s: float) -> None:
        """Wait until a server answers; costs no tokens.

        Raises ServerUnavailable with URLs and last error, InferenceError where the key is refused.
        """
        await self._transport.wait_until_up(timeout_s)

    async def capabilities(self, model: str | None) -> Capabilities:
        """What the servers can do for `model` (None: the first they list).

        Asked once, of one server: those of an endpoint are taken to be equal.
        Raises InferenceError where asking fails, so that nothing was found out.
        """
        return await self._ask_once(model, self._request_timeout_s)

    async def chat(
        self,
        messages: list[Message],
        *,
        model: str,
        sampling: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        prior: Completion | None = None,
        seed: int | None,
        sticky: str = "",
        deadline_s: float,
        want_tokens: bool,
        max_attempts: int = 3,
    ) -> Completion:
        """One assistant turn.

        `want_tokens`: with prompt ids, sampled ids and their logprobs (vLLM), or an error; sampling
        that is not named is neutral then, not the model's recommendation. `prior` is the turn
        before, to be passed only where `messages` follows it (`continuation.follows`); then nothing
        that was sampled is tokenised again, if template and server allow it: `continuation.extends`
        tells whether they did.

        A budget beyond the context is cut to it. Raises ContextOverflow where the prompt itself
        doesn't fit, DeadlinePassed, ServerUnavailable, and InferenceError with the server's words.
        """
        turn = _Turn(
            messages=messages, model=model, sampling=sampling, tools=tools, seed=seed,
            sticky=sticky, until=time.monotonic() + deadline_s, max_attempts=max_attempts,
        )
        if want_tokens and prior is not None:
            continued = await self._continued(turn, prior)
            if continued is not None:
                return continued
        return await self._plain(turn, want_tokens)

    async def prompt_logprobs(
        self, token_ids: list[int], k: int, *, model: str, deadline_s: float, sticky: str = ""
    ) -> PromptLogprobs:
        """The k best tokens (k = 0: none) and the own token's logprob, for each position.

        Raises InferenceError, not retryable, where lengths or numbers of the answer can't be true.
        """
        if k < 0 or not token_ids:
            raise ValueError(f"prompt_logprobs needs k >= 0 and tokens, got k={k}, {token_ids=}")
        reply = await self._transport.request(
            bodies.COMPLETIONS, bodies.score_body(model, token_ids, k),
            until=time.monotonic() + deadline_s, sticky=sticky, max_attempts=3,
            tokens=len(token_ids),
        )
        # Up to a megabyte of JSON: off the event loop, which serves other requests meanwhile.
        return await asyncio.to_thread(dialects.parse_prompt_logprobs, reply.body, token_ids, k)

    async def text_offsets(
        self, token_ids: list[int], seen: PromptLogprobs, *, model: str, deadline_s: float
    ) -> list[int] | None:
        """Where each token begins in the text of them all; None where the server doesn't tell."""
        pieces = [piece for piece in seen.pieces[1:] if piece is not None]
        if len(pieces) != len(token_ids) - 1:
            return None
        until = time.monotonic() + deadline_s
        try:
            first = self._first_texts.get((model, token_ids[0]))
            if first is None:
                first = await self._text(token_ids[:1], model, until)
                self._first_texts[model, token_ids[0]] = first
            text = await self._text(token_ids, model, until)
        except InferenceError as error:
            log.debug("inference_no_text_offsets", error=str(error))
            return None
        return text_offsets.text_offsets([first, *pieces], text)

    async def tokenizer_fingerprint(self, model: str, deadline_s: float) -> list[str]:
        """How the server's tokenizer takes the probes of `vocabulary`. Raises InferenceError."""
        until = time.monotonic() + deadline_s
        ids = []
        for text in vocabulary.PROBES:
            body = {"model": model, "prompt": text, "add_special_tokens": False}
            reply = await self._transport.request(
                bodies.TOKENIZE, body, until=until, sticky="capabilities", max_attempts=3
            )
            ids.append(dialects.parse_tokenized(reply.body).tokens)
        return vocabulary.fingerprint(ids)

    async def _text(self, token_ids: list[int], model: str, until: float) -> str:
        body = {"model": model, "tokens": token_ids}
        reply = await self._transport.request(
            bodies.DETOKENIZE, body, until=until, max_attempts=3
        )
        return dialects.parse_detokenized(reply.body)

    async def _plain(self, turn: _Turn, want_tokens: bool) -> Completion:
        """A chat request, again where the server teaches something about its parameters."""
        sampling = turn.sampling
        attempts = 0
        while True:
            lessons = Lessons() if want_tokens else self._lessons_of(turn.model)
            body = bodies.chat_body(
                turn.model, turn.messages, sampling, tools=turn.tools, seed=turn.seed,
                want_tokens=want_tokens, lessons=lessons,
            )
            try:
                reply = await self._post(bodies.CHAT, body, turn)
            except ContextOverflow:
                # Often it is prompt + budget that doesn't fit; unnamed, the budget is what is left.
                budget = {"max_tokens", "max_completion_tokens"} & sampling.keys()
                if not budget:
                    raise
                sampling = {k: v for k, v in sampling.items() if k not in budget}
            except InferenceError as error:
                if want_tokens:
                    raise
                learnt = learn(self._lessons_of(turn.model), body, error)
                if learnt == lessons:
                    raise
                self._lessons[turn.model] = learnt
            else:
                done = dialects.parse_chat(reply.body, want_tokens=want_tokens)
                return _signed(done, reply, attempts)
            attempts += 1

    async def _continued(self, turn: _Turn, prior: Completion) -> Completion | None:
        """The turn after `prior` by token ids; None where that can't be done exactly."""
        answer_at = continuation.last_answer(turn.messages)
        if answer_at is None or not turn.sampling.keys() <= bodies.TOKEN_ROUTE_KEYS:
            return None
        found = await self._ask_once(turn.model, turn.until - time.monotonic())
        # Only the server can parse tool calls and reasoning: after generate, by derendering.
        to_parse = bool(turn.tools) or any(key in prior.message for key in _REASONING)
        # A stop string has to be cut off the text, which /v1/completions does.
        by_generate = found.generate_route and not turn.sampling.get("stop")
        if not (found.tokenize and found.token_ids):
            return None
        if to_parse and not (by_generate and found.derender):
            return None
        try:
            tail, context_tokens = await self._tail(turn, answer_at)
        except InferenceError as error:
            if error.retryable:
                raise
            log.debug("inference_continuation_refused", error=str(error))
            return None
        ids = continuation.next_prompt(prior, tail or [])
        if tail is None or ids is None or context_tokens is None:
            return None
        sampling = _within(turn.sampling, len(ids), context_tokens)
        if not by_generate:
            body = bodies.completions_body(turn.model, ids, sampling, turn.seed)
            reply = await self._post(bodies.COMPLETIONS, body, turn)
            return _signed(dialects.parse_completion(reply.body, ids), reply)
        body = bodies.generate_body(turn.model, ids, sampling, turn.seed)
        reply = await self._post(bodies.GENERATE, body, turn)
        done = _signed(dialects.parse_generate(reply.body, ids), reply)
        if found.derender:
            await self._derender(turn, done, reply.body)
        else:
            await self._detokenize(turn, done, end_of_turn=tail[0])
        return done

    async def _tail(self, turn: _Turn, answer_at: int) -> tuple[list[int] | None, int | None]:
        """What the template adds after the answer, and the context's length."""
        renderings = []
        for placeholder in continuation.PLACEHOLDERS:
            messages = continuation.with_placeholder(turn.messages, answer_at, placeholder)
            body = bodies.tokenize_body(turn.model, messages, turn.sampling, turn.tools)
            reply = await self._post(bodies.TOKENIZE, body, turn)
            renderings.append(dialects.parse_tokenized(reply.body))
        one, other = renderings
        return continuation.tail_between(one.tokens, other.tokens), one.max_model_len

    async def _derender(self, turn: _Turn, done: Completion, generated: bytes) -> None:
        assert done.prompt_ids is not None
        chat = bodies.chat_body(
            turn.model, turn.messages, turn.sampling, tools=turn.tools, seed=None, want_tokens=False
        )
        body = bodies.derender_body(turn.model, generated, len(done.prompt_ids), chat)
        reply = await self._post(bodies.DERENDER, body, turn)
        done.message = dialects.parse_derendered(reply.body)
        done.text = done.message.get("content") or ""
        if done.finish_reason == "stop" and done.message.get("tool_calls"):
            done.finish_reason = "tool_calls"  # as the chat route has it

    async def _detokenize(self, turn: _Turn, done: Completion, *, end_of_turn: int) -> None:
        ids = done.token_ids or []
        if ids and ids[-1] == end_of_turn:
            ids = ids[:-1]
        if ids:
            body = {"model": turn.model, "tokens": ids}
            reply = await self._post(bodies.DETOKENIZE, body, turn)
            done.text = dialects.parse_detokenized(reply.body)
        done.message = {"role": "assistant", "content": done.text}

    async def _post(self, path: str, body: dict[str, Any], turn: _Turn) -> Reply:
        return await self._transport.request(
            path, body, until=turn.until, sticky=turn.sticky, max_attempts=turn.max_attempts,
            tokens=bodies.size_tokens(body), due=self.due if path in bodies.SAMPLING else None,
        )

    async def _ask_once(self, model: str | None, timeout_s: float) -> Capabilities:
        until = time.monotonic() + timeout_s

        async def ask(path: str, body: dict[str, Any] | None) -> bytes:
            reply = await self._transport.request(
                path, body, until=until, sticky="capabilities", max_attempts=3
            )
            return reply.body

        try:
            async with asyncio.timeout(timeout_s), self._asking:
                if model not in self._found:
                    self._found[model] = await probe(ask, model)
        except TimeoutError:
            words = "the deadline passed while asking what the server can do"
            raise DeadlinePassed(words) from None
        return self._found[model]

    def _lessons_of(self, model: str) -> Lessons:
        return self._lessons.get(model, Lessons())


def _signed(done: Completion, reply: Reply, attempts_before: int = 0) -> Completion:
    done.endpoint, done.attempts = reply.url, reply.attempts + attempts_before
    version = version_of(reply.label)
    if not done.versions and version is not None and done.token_ids:
        # Of the oldest weights that it can be: newer ones may have come while it was sampled.
        done.versions = [VersionSpan(version, 0, len(done.token_ids))]
    return done


def _within(sampling: dict[str, Any], prompt_tokens: int, context_tokens: int) -> dict[str, Any]:
    """The sampling, its budget cut to the context. Raises ContextOverflow where none is left."""
    left = context_tokens - prompt_tokens
    if left < 1:
        raise ContextOverflow(
            f"the turn's prompt has {prompt_tokens} tokens, the model's context {context_tokens}"
        )
    return sampling | {"max_tokens": min(sampling.get("max_tokens") or left, left)}


async def tokenizer_facts(
    client: InferenceClient, found: Capabilities, model: str
) -> dict[str, list[str]]:
    """What a stage answers of its server's tokenizer: policy and teacher must have the same one.

    Raises InferenceError.
    """
    if not found.tokenize:
        return {}
    return {vocabulary.TOKENIZER: await client.tokenizer_fingerprint(model, FINGERPRINT_S)}
