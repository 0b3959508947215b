"""verifiers' model client, speaking through whatever call the generator gives it.

It runs an environment's own loop against our inference client: every turn's tokens are kept beside
the messages, and a later turn passes on the answer it continues, so that nothing that was sampled
is tokenised again.
"""

from __future__ import annotations

from typing import Any, Protocol

from verifiers.legacy.clients.client import Client
from verifiers.legacy.errors import ModelError, OverlongPromptError
from verifiers.legacy.types import (
    FinishReason,
    Messages,
    Response,
    ResponseMessage,
    ResponseTokens,
    SamplingArgs,
    State,
    Tool,
    Usage,
)

from rollstream.shared.environments.messages import from_openai, to_openai
from rollstream.shared.inference.refusals import RefusesAll
from rollstream.shared.inference.types import (
    Completion,
    ContextOverflow,
    InferenceError,
    ServerUnavailable,
)
from rollstream.shared.records import Message, Stop

_ENDINGS = {"abort": Stop.CANCELLED, "content_filter": Stop.REFUSED}
_VERIFIERS_FINISH: dict[str, FinishReason] = {
    "stop": "stop", "length": "length", "tool_calls": "tool_calls",
}


class ChatCall(Protocol):
    """One chat request to an inference server.

    `prior` is the earlier answer of this rollout that `messages` continue, if any. Raises
    InferenceError after its own attempts.
    """

    async def __call__(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None,
        sampling: dict[str, Any],
        prior: Completion | None,
    ) -> Completion: ...


async def no_model(
    messages: list[Message],
    *,
    tools: list[dict[str, Any]] | None,
    sampling: dict[str, Any],
    prior: Completion | None,
) -> Completion:
    """The ChatCall of a process without a policy: a rubric that asks it must be scored fused."""
    raise InferenceError("this environment's rubric asks the policy model, which only the "
                         "generator has: score it there (fused)")


class RolloutClient(Client[ChatCall, list[Message], Completion, dict[str, Any]]):
    """The client of one rollout."""

    def __init__(self, chat: ChatCall) -> None:
        super().__init__(chat)
        self.state: State | None = None
        """The rollout's state, kept for the case that the environment's own code raises."""
        self.answers: list[tuple[Response, Completion]] = []
        """Everything the environment asked for, in order, its side calls included."""
        self.ended: tuple[Stop, Completion] | None = None
        """Set where the server aborted or refused: the answer is part of no trajectory."""
        self._histories: list[list[Message]] = []

    def setup_client(self, config: object) -> ChatCall:
        raise NotImplementedError("this client is made from a ChatCall, not from a configuration")

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: SamplingArgs,
        tools: list[Tool] | None = None,
        **kwargs: Any,
    ) -> Response:
        """One turn.

        Raises OverlongPromptError, ModelError (the rollout ends with an error), or the original
        RefusesAll or ServerUnavailable where every other sample would fail alike.
        """
        self.state = kwargs.get("state", self.state)
        messages = to_openai(prompt)
        try:
            completion = await self.client(
                messages,
                tools=await self.to_native_tools(tools),
                sampling=flat_sampling(sampling_args),
                prior=self._prior(messages),
            )
        except TimeoutError as error:  # verifiers would take it for the environment's own limit
            raise ModelError(f"the request timed out: {error}") from error
        except ContextOverflow as error:
            raise OverlongPromptError(str(error)) from error
        except (RefusesAll, ServerUnavailable):
            raise
        except InferenceError as error:
            raise ModelError(str(error)) from error
        if completion.finish_reason in _ENDINGS:
            self.ended = _ENDINGS[completion.finish_reason], completion
            raise ModelError(f"the server ended the request: {completion.finish_reason}")
        response = to_response(completion, model)
        self.answers.append((response, completion))
        self._histories.append(messages + to_openai([response.message]))
        return response

    def _prior(self, messages: list[Message]) -> Completion | None:
        """The answer whose history is the longest prefix of these messages."""
        best: Completion | None = None
        length = 0
        for history, (_, completion) in zip(self._histories, self.answers, strict=True):
            if len(history) >= length and messages[: len(history)] == history:
                best, length = completion, len(history)
        return best

    async def to_native_tool(self, tool: Tool) -> dict[str, Any]:
        function: dict[str, Any] = {
            "name": tool.name, "description": tool.description, "parameters": tool.parameters,
        }
        if tool.strict is not None:
            function["strict"] = tool.strict
        return {"type": "function", "function": function}

    async def to_native_prompt(self, messages: Messages) -> tuple[list[Message], dict]:
        return to_openai(messages), {}

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Completion:
        raise NotImplementedError("get_response does the whole request")

    async def raise_from_native_response(self, response: Completion) -> None:
        """Nothing to refuse: an empty text with a sampled token is a normal sample."""

    async def from_native_response(self, response: Completion) -> Response:
        return to_response(response, "")

    async def close(self) -> None:
        """Nothing to close: the call is the generator's."""


def flat_sampling(sampling: dict[str, Any] | None) -> dict[str, Any]:
    """verifiers' sampling arguments with `extra_body` lifted up and nulls and `n` taken out."""
    flat = dict(sampling or {})
    flat |= flat.pop("extra_body", None) or {}
    return {key: value for key, value in flat.items() if value is not None and key != "n"}


def to_response(completion: Completion, model: str) -> Response:
    """One answer as verifiers' Response, with tokens where ids and logprobs are known."""
    given = {key: value for key, value in completion.message.items() if value is not None}
    content = completion.message.get("content", completion.text)
    [message] = from_openai([{**given, "role": "assistant", "content": content}])
    fields = message.model_dump(exclude_none=True)
    return Response(
        id="",
        created=0,
        model=model,
        usage=Usage(
            prompt_tokens=completion.usage.prompt_tokens,
            reasoning_tokens=completion.usage.reasoning_tokens,
            completion_tokens=completion.usage.completion_tokens,
            total_tokens=completion.usage.prompt_tokens + completion.usage.completion_tokens,
        ),
        message=ResponseMessage(
            **fields,
            finish_reason=_VERIFIERS_FINISH.get(completion.finish_reason),
            is_truncated=completion.finish_reason == "length",
            tokens=_tokens(completion),
        ),
    )


def _tokens(completion: Completion) -> ResponseTokens | None:
    prompt_ids, token_ids = completion.prompt_ids, completion.token_ids
    if prompt_ids is None or token_ids is None or completion.logprobs is None:
        return None
    return ResponseTokens(
        prompt_ids=prompt_ids,
        prompt_mask=[0] * len(prompt_ids),
        completion_ids=token_ids,
        completion_mask=[1] * len(token_ids),
        completion_logprobs=completion.logprobs,
    )
