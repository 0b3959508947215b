"""The engine over real HTTP with the real model: vLLM's shapes, and the numerical promise."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from rollstream.services.engine.convert import ModelNotFound, default_cache, locate, prepare

MODEL = "smollm2-135m"
TOLERANCE = 1e-4
ASK = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris." and the end
EXAMPLES = [(12, 25), (31, 17)]
# In a process of its own: one product thread there, however many this one has.
REFERENCE = """
import json, sys
from pathlib import Path
import numpy as np
from rollstream.services.engine.reference import reference_logprobs
from rollstream.services.engine.weights import load_converted
weights = load_converted(Path(sys.argv[1]))
rows = [reference_logprobs(weights, s).astype(np.float32) for s in json.load(sys.stdin)]
np.savez(sys.argv[2], *rows)
"""


class Server:
    """An engine process and what it printed when it was ready."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "rollstream.services.engine", "--port", "0", *flags]
        command += ["--parent-pid", str(os.getpid())]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        if "engine ready on" not in self.ready:
            raise RuntimeError(f"the engine did not start: exit code {self.process.wait(10)}")
        self.url = self.ready.split()[3].removesuffix("/v1")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(15)


class Client:
    """Asks one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def get(self, route: str) -> Any:
        async with self.session.get(self.url + route) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json(content_type=None) if answer.content_length else None

    async def post(self, route: str, status: int = 200, headers: Any = None, **body: Any) -> Any:
        url = self.url + route
        async with self.session.post(url, json=body, headers=headers) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json(content_type=None) if answer.content_length else None

    async def chat(self, **body: Any) -> Any:
        return await self.post("/v1/chat/completions", **({"model": MODEL, "messages": ASK} | body))

    async def generate(self, token_ids: list[int], **sampling: Any) -> Any:
        body = {"model": MODEL, "token_ids": token_ids, "sampling_params": sampling}
        return await self.post("/inference/v1/generate", **body)

    async def metric(self, name: str) -> int:
        async with self.session.get(self.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(int(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    async def until(self, name: str, low: int, high: int | None = None) -> None:
        """Waits for a metric to lie within low..high (just low where no high is given)."""
        high = low if high is None else high
        deadline = time.monotonic() + 20
        while not low <= await self.metric(name) <= high:
            assert time.monotonic() < deadline, f"{name} never became {low}"
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return prepare(locate("smollm2"), default_cache())
    except ModelNotFound as error:
        pytest.skip(f"smollm2 {error}")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    running = Server()
    yield running
    assert running.stop() == 0


async def client_of(server: Server) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield Client(session, server.url)


@pytest_asyncio.fixture
async def engine(server: Server) -> AsyncIterator[Client]:
    async for client in client_of(server):
        yield client


@pytest.fixture(scope="module")
def scripted_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    script = tmp_path_factory.mktemp("script") / "script.jsonl"
    lines = [
        {"match": "sum", "text": "it is 7"}, {"match": "sum", "text": "it is 8"},
        {"match": "broken", "status": 500, "message": "out of order"},
        {"match": "slow", "text": "late", "delay_s": 0.3}, {"text": "well " * 50},
    ]
    script.write_text("\n".join(map(json.dumps, lines)))
    running = Server("--script", str(script))
    yield running
    assert running.stop() == 0


@pytest_asyncio.fixture
async def scripted(scripted_server: Server) -> AsyncIterator[Client]:
    async for client in client_of(scripted_server):
        yield client


def addition(a: int, b: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Answer with the equation."}]
    for x, y in EXAMPLES:
        messages += [{"role": "user", "content": f"What is {x} + {y}?"},
                     {"role": "assistant", "content": f"{x} + {y} = {x + y}"}]
    return [*messages, {"role": "user", "content": f"What is {a} + {b}?"}]


# --- the numerical promise ---------------------------------------------------------------------


async def test_mixed_concurrent_requests_equal_a_forward_pass_from_scratch(
    engine: Client, folder: Path, tmp_path: Path
) -> None:
    """Sampled logprobs and the teacher's top k, through batches and the prefix cache."""
    hits = await engine.metric("prefix_cache_hits_total")
    common = {"max_tokens": 14, "logprobs": True, "top_logprobs": 4, "return_token_ids": True}
    asked = [
        engine.chat(messages=addition(23, 45), n=2, seed=1, **common),
        engine.chat(messages=addition(11, 38), seed=2, prompt_logprobs=3, **common),
        engine.chat(messages=addition(23, 45), temperature=0.5, seed=3, **common),
        engine.chat(messages=addition(23, 45), temperature=2.0, top_k=7, seed=4, **common),
        engine.chat(seed=5, ignore_eos=True, top_p=0.7, **(common | {"max_tokens": 25})),
        engine.chat(temperature=0, **common),
    ]
    answers = await asyncio.gather(*asked)
    sequences = [
        (answer["prompt_token_ids"], choice["token_ids"])
        for answer in answers for choice in answer["choices"]
    ]
    teacher = await asyncio.gather(
        *(
            engine.post("/v1/completions", model=MODEL, prompt=prompt + output, max_tokens=1,
                        temperature=0, prompt_logprobs=8)
            for prompt, output in sequences
        )
    )
    assert await engine.metric("prefix_cache_hits_total") - hits > 600
    rows = reference([p + o for p, o in sequences], folder, tmp_path / "rows.npz")
    cuts = [(1, 0, 1), (1, 0, 1), (0.5, 0, 1), (2, 7, 1), (1, 0, 0.7), (1, 0, 1)]
    for answer, cut in zip(answers, cuts, strict=True):
        prompt = answer["prompt_token_ids"]
        for choice in answer["choices"]:
            check_sampled(prompt, choice, rows[tuple(prompt + choice["token_ids"])], *cut)
    asked_by_student = answers[1]
    prompt, output = asked_by_student["prompt_token_ids"], sequences[2][1]
    check_prompt(prompt, asked_by_student["prompt_logprobs"], rows[tuple(prompt + output)], k=3)
    for (prompt, output), answer in zip(sequences, teacher, strict=True):
        scored = answer["choices"][0]["prompt_logprobs"]
        check_prompt(prompt + output, scored, rows[tuple(prompt + output)], k=8)


def reference(
    sequences: list[list[int]], folder: Path, file: Path
) -> dict[tuple[int, ...], np.ndarray]:
    """Every sequence's log-probabilities by the plain forward pass."""
    subprocess.run(
        [sys.executable, "-c", REFERENCE, str(folder), str(file)], input=json.dumps(sequences),
        text=True, check=True, timeout=100, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    with np.load(file) as rows:
        return {tuple(s): rows[f"arr_{i}"] for i, s in enumerate(sequences)}


def check_sampled(
    prompt: list[int], choice: Any, rows: np.ndarray, temperature: float, top_k: int, top_p: float
) -> None:
    """Each sampled token's logprob under the sampler's own distribution."""
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    for t, (token, entry) in enumerate(zip(choice["token_ids"], content, strict=True)):
        policy = rows[len(prompt) - 1 + t] / temperature
        order = np.argsort(-policy)
        kept = order[:top_k] if top_k else order
        policy = policy - np.log(np.exp(policy[kept]).sum())
        mass_before = np.cumsum(np.exp(policy[kept])) - np.exp(policy[kept])
        kept = kept[mass_before < top_p]
        policy = policy - np.log(np.exp(policy[kept]).sum())
        assert token in kept
        assert entry["logprob"] == pytest.approx(policy[token], abs=TOLERANCE)
        best = sorted((e["logprob"] for e in entry["top_logprobs"]), reverse=True)[:4]
        kept_best = policy[kept][: len(best)]
        np.testing.assert_allclose(best[: len(kept_best)], kept_best, atol=TOLERANCE)


def check_prompt(tokens: list[int], scored: list[Any], rows: np.ndarray, k: int) -> None:
    """Entry t is the model's view of token t: the token itself first, and the k best by rank."""
    assert (len(scored), scored[0]) == (len(tokens), None)
    for t in range(1, len(tokens)):
        row, own = rows[t - 1], str(tokens[t])
        assert next(iter(scored[t])) == own
        by_rank = {entry["rank"]: entry["logprob"] for entry in scored[t].values()}
        assert set(range(1, k + 1)) <= set(by_rank)
        best = np.sort(row)[::-1][:k]
        np.testing.assert_allclose([by_rank[i] for i in range(1, k + 1)], best, atol=TOLERANCE)
        assert scored[t][own]["logprob"] == pytest.approx(row[tokens[t]], abs=TOLERANCE)
        assert scored[t][own]["rank"] == pytest.approx((row >= row[tokens[t]]).sum(), abs=2)


async def test_the_same_request_gives_the_same_tokens(engine: Client) -> None:
    body = {"max_tokens": 12, "seed": 9, "temperature": 1.5, "return_token_ids": True}
    first, other = await engine.chat(**body), await engine.chat(**(body | {"seed": 10}))
    again = await engine.chat(**body)
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert other["choices"][0]["token_ids"] != first["choices"][0]["token_ids"]


# --- shapes --------------------------------------------------------------------------------------


async def test_chat(engine: Client) -> None:
    answer = await engine.chat(
        n=2, temperature=0, max_tokens=20, logprobs=True, top_logprobs=2, return_token_ids=True,
        return_tokens_as_token_ids=True, headers={"X-Request-Id": "mine"},
    )
    assert (answer["id"], answer["object"], answer["model"]) == (
        "chatcmpl-mine", "chat.completion", MODEL
    )
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice["message"]["content"] == "The capital of France is Paris."
        assert choice["token_ids"] == PARIS
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        first = choice["logprobs"]["content"][0]
        assert (first["token"], bytes(first["bytes"])) == ("token_id:504", b"The")
        assert first["top_logprobs"][0]["token"] == "token_id:504"
        assert len(first["top_logprobs"]) == 2
    prompt = len(answer["prompt_token_ids"])
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 16)
    assert usage["total_tokens"] == prompt + 16
    assert answer["prompt_logprobs"] is None


async def test_chat_takes_text_parts_and_says_nothing_it_was_not_asked(engine: Client) -> None:
    parts = [{"type": "text", "text": text} for text in ("What is the capital", "of France?")]
    answer = await engine.chat(
        messages=[{"role": "user", "content": parts}], max_completion_tokens=1, temperature=0,
        request_id="body-id",
    )
    assert answer["id"] == "chatcmpl-body-id"
    choice = answer["choices"][0]
    assert (choice["logprobs"], choice["token_ids"], answer["prompt_token_ids"]) == (None,) * 3
    assert choice["finish_reason"] == "length"


async def test_stop_strings_and_tokens_cut_the_text(engine: Client) -> None:
    greedy = {"temperature": 0, "return_token_ids": True}
    by_text = (await engine.chat(stop=[" is", "zzz"], **greedy))["choices"][0]
    assert by_text["message"]["content"] == "The capital of France"
    assert (by_text["finish_reason"], by_text["stop_reason"]) == ("stop", " is")
    assert by_text["token_ids"] == PARIS[:5]
    by_token = (await engine.chat(stop_token_ids=[314], **greedy))["choices"][0]
    assert by_token["message"]["content"] == "The capital of France"
    assert (by_token["stop_reason"], by_token["token_ids"]) == (314, PARIS[:5])


async def test_a_stream_is_the_whole_answer_in_pieces(engine: Client) -> None:
    body = {
        "model": MODEL, "messages": ASK, "temperature": 0, "stream": True, "return_token_ids": True,
        "logprobs": True, "n": 2, "stop": ["Rome"], "stream_options": {"include_usage": True},
    }
    async with engine.session.post(engine.url + "/v1/chat/completions", json=body) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = (await answer.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert events[0]["prompt_token_ids"][0] == 1
    assert events[-1]["usage"]["completion_tokens"] == 16
    for index in range(2):
        chunks = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
        text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        assert text == "The capital of France is Paris."
        assert [i for chunk in chunks for i in chunk.get("token_ids", [])] == PARIS
        assert sum(len((c["logprobs"] or {"content": []})["content"]) for c in chunks) == 8
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["stop"]
        assert len(chunks) > 4


async def test_completions_of_texts_ids_and_lists(engine: Client) -> None:
    greedy = {"model": MODEL, "temperature": 0, "max_tokens": 2, "return_token_ids": True}
    ids = (await engine.post("/tokenize", prompt="The capital of France is"))["tokens"]
    for prompt, count in [("The capital of France is", 1), (ids, 1), ([ids, ids], 2),
                          (["The capital of France is"], 1)]:
        answer = await engine.post("/v1/completions", prompt=prompt, logprobs=1, **greedy)
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        for choice in answer["choices"]:
            assert choice["prompt_token_ids"] == ids
            assert choice["text"].startswith(" Paris")
            logprobs = choice["logprobs"]
            assert logprobs["tokens"][0] == " Paris"
            assert logprobs["top_logprobs"][0] == {" Paris": logprobs["token_logprobs"][0]}
            assert logprobs["text_offset"] == [0, len(" Paris")]


async def test_echo_scores_the_prompt_in_openai_s_shape(engine: Client) -> None:
    body = {"model": MODEL, "prompt": "The capital of France", "temperature": 0, "logprobs": 1}
    echo = await engine.post("/v1/completions", echo=True, max_tokens=0, **body)
    choice = echo["choices"][0]
    assert choice["text"] == "The capital of France"
    lists = choice["logprobs"]
    assert lists["tokens"] == ["The", " capital", " of", " France"]
    assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
    scored = await engine.post("/v1/completions", prompt_logprobs=1, max_tokens=1, **body)
    rows = scored["choices"][0]["prompt_logprobs"]
    own = [next(iter(row.values()))["logprob"] for row in rows[1:]]
    np.testing.assert_allclose(lists["token_logprobs"][1:], own, atol=TOLERANCE)


async def test_generate_takes_and_gives_tokens(engine: Client) -> None:
    rendered = await engine.post(
        "/v1/chat/completions/render", model=MODEL, messages=ASK, temperature=0, max_tokens=20
    )
    rendered["sampling_params"] |= {"logprobs": 1, "prompt_logprobs": 0, "n": 2}
    answer = await engine.post("/inference/v1/generate", **(rendered | {"request_id": "abc"}))
    assert answer["request_id"] == "generate-tokens-abc"
    assert len(answer["prompt_logprobs"]) == len(rendered["token_ids"])
    assert len(answer["prompt_logprobs"][1]) == 1
    for choice in answer["choices"]:
        assert choice["token_ids"] == PARIS
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]
        first = choice["logprobs"]["content"][0]
        assert (first["token_id"], first["rank"]) == (504, 1)
        assert first["top_logprobs"] == [
            {"token_id": 504, "logprob": first["logprob"], "rank": 1}
        ]


async def test_tokenize_and_back(engine: Client) -> None:
    answer = await engine.post("/tokenize", prompt="hi there", return_token_strs=True)
    assert answer == {
        "count": 2, "max_model_len": 2048, "tokens": [6004, 665], "token_strs": ["hi", "Ġthere"]
    }
    assert await engine.post("/detokenize", tokens=[6004, 665]) == {"prompt": "hi there"}
    chat = await engine.post("/tokenize", messages=ASK, add_generation_prompt=False)
    whole = await engine.post("/tokenize", messages=ASK)
    assert whole["tokens"] == chat["tokens"] + [1, 520, 9531, 198]


async def test_what_it_says_of_itself(engine: Client) -> None:
    assert await engine.get("/health") is None
    assert await engine.get("/ping") is None
    assert (await engine.get("/version"))["logprobs_mode"] == "processed_logprobs"
    (card,) = (await engine.get("/v1/models"))["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, 2048)
    before = await engine.metric("generation_tokens_total")
    stopped = await engine.metric("request_success_total")
    await engine.chat(max_tokens=3, n=2, ignore_eos=True)
    assert await engine.metric("generation_tokens_total") == before + 6
    assert await engine.metric("request_success_total") == stopped + 2


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({"model": "gpt-9"}, 404, "model", "The model `gpt-9` does not exist"),
        ({"n": 0}, 400, "n", "n: Expected `int` >= 1"),
        ({"temperature": -1}, 400, "temperature", "temperature: Expected `float` >= 0"),
        ({"top_p": 0}, 400, "top_p", "top_p: "),
        ({"max_tokens": "many"}, 400, "max_tokens", "max_tokens: Expected `int"),
        ({"messages": []}, 400, "messages", "messages: "),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages", "messages[0].content"),
        ({"messages": [{"content": "x"}]}, 400, "messages", "messages[0].role"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "not supported by this engine"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "knows no tools"),
        ({"top_logprobs": 2}, 400, "top_logprobs", "needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "logprobs", "max allowed: 20"),
        ({"prompt_logprobs": 50}, 400, "prompt_logprobs",
         "Requested prompt logprobs of 50, which is greater than max allowed: 20"),
        ({"max_tokens": 2040}, 400, "messages", "maximum context length is 2048 tokens"),
        ({"messages": [{"role": "user", "content": "a b " * 1500}]}, 400, "messages",
         "maximum context length is 2048 tokens"),
    ],
)
async def test_refusals(
    engine: Client, body: dict[str, Any], status: int, param: str, says: str
) -> None:
    error = (await engine.chat(status=status, **body))["error"]
    assert (error["param"], error["code"]) == (param, status)
    assert says in error["message"]
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")


async def test_more_refusals(engine: Client) -> None:
    bad = await engine.post("/v1/completions", 400, prompt=[49152], model=MODEL)
    assert "Token id 49152 is out of vocabulary" in bad["error"]["message"]
    bad = await engine.post("/v1/completions", 400, prompt=[5, "x"], model=MODEL)
    assert bad["error"]["param"] == "prompt"
    bad = await engine.post("/inference/v1/generate", 400, token_ids=[1])
    assert bad["error"]["param"] == "sampling_params"
    bad = await engine.post("/no/such/route", 404)
    assert bad["error"]["type"] == "NotFoundError"
    bad = await engine.post("/collective_rpc", 400, method="reload_weights",
                            kwargs={"weights_path": "/no/such"})
    assert bad["error"]["param"] == "kwargs.weights_path"


# --- control -------------------------------------------------------------------------------------

LONG = {"max_tokens": 1500, "ignore_eos": True, "return_token_ids": True}


async def test_a_client_that_goes_away_stops_its_work(engine: Client) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.chat(n=4, **LONG), 0.5)
    await engine.until("num_requests_running", 0)


@pytest.mark.parametrize("route", ["/abort_requests", "/inference/v1/abort_requests"])
async def test_aborted_requests_answer_with_what_they_have(engine: Client, route: str) -> None:
    asked = asyncio.ensure_future(engine.chat(**LONG, request_id="kill-me"))
    await engine.until("num_requests_running", 1)
    answer = await engine.post(route, request_ids=["chatcmpl-kill-me"])
    assert answer == ({"status": "aborted", "aborted": 1} if route == "/abort_requests" else None)
    choice = (await asked)["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) < 1500


async def test_new_weights_between_two_tokens(engine: Client, folder: Path) -> None:
    """pause(keep), reload, new version, resume: one answer, two versions."""
    prompt = (await engine.post("/tokenize", messages=ASK))["tokens"]
    sampling = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    asked = asyncio.ensure_future(engine.generate(prompt, **sampling))
    await engine.until("num_requests_running", 1)
    before = await engine.metric("generation_tokens_total")
    await engine.until("generation_tokens_total", before + 3, before + 40)
    assert await engine.post("/pause?mode=keep") == {"status": "paused"}
    assert await engine.get("/is_paused") == {"is_paused": True}
    frozen = await engine.metric("generation_tokens_total")
    reloaded = await engine.post("/collective_rpc", method="reload_weights",
                                 kwargs={"weights_path": str(folder)})
    assert reloaded == {"results": [None]}
    await engine.post("/update_weight_version", new_version="step-1")
    assert await engine.get("/weight_info") == {"weight_version": "step-1"}
    held = asyncio.ensure_future(engine.chat(max_tokens=2))
    await asyncio.sleep(0.2)
    assert not held.done()
    assert await engine.metric("generation_tokens_total") == frozen
    await engine.post("/resume")
    assert await engine.get("/is_paused") == {"is_paused": False}
    spans = (await asked)["choices"][0]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "step-1"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 40)
    assert (await held)["usage"]["completion_tokens"] == 2
    await engine.post("/update_weight_version", new_version="default")


async def test_pause_by_waiting_and_by_aborting(engine: Client) -> None:
    asked = asyncio.ensure_future(engine.chat(max_tokens=15, ignore_eos=True))
    await engine.until("num_requests_running", 1)
    await engine.post("/pause?mode=wait")
    assert (await asked)["choices"][0]["finish_reason"] == "length"
    await engine.post("/resume")
    asked = asyncio.ensure_future(engine.chat(**LONG))
    await engine.until("num_requests_running", 1)
    await engine.post("/pause?mode=abort")
    assert (await asked)["choices"][0]["finish_reason"] == "abort"
    await engine.post("/resume")
    error = (await engine.post("/pause?mode=now", 400))["error"]
    assert error["param"] == "mode"


async def test_the_prefix_cache_can_be_forgotten(engine: Client) -> None:
    body = {"messages": addition(41, 13), "max_tokens": 1}
    await engine.chat(**body)
    known = (await engine.chat(**body))["usage"]
    assert known["prompt_tokens_details"]["cached_tokens"] == known["prompt_tokens"]
    assert await engine.post("/reset_prefix_cache") == {"success": True}
    again = (await engine.chat(**body))["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == 0


# --- scripts and the process ---------------------------------------------------------------------


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def test_a_script_answers_in_order_through_the_real_tokenizer(scripted: Client) -> None:
    wanted = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "prompt_logprobs": 2}
    answers = [await scripted.chat(**user("the sum?"), **wanted) for _ in range(3)]
    texts = [a["choices"][0]["message"]["content"] for a in answers]
    assert texts == ["it is 7", "it is 8", "it is 7"]
    choice = answers[0]["choices"][0]
    ids = (await scripted.post("/tokenize", prompt="it is 7"))["tokens"]
    assert choice["token_ids"] == [*ids, 2]
    assert {e["logprob"] for e in choice["logprobs"]["content"]} == {-0.5}
    assert choice["finish_reason"] == "stop"
    assert all(len(row) == 2 for row in answers[0]["prompt_logprobs"][1:])
    prompt = (await scripted.post("/tokenize", **user("the sum?")))["tokens"]
    by_tokens = (await scripted.generate(prompt, max_tokens=2))["choices"][0]
    assert (by_tokens["token_ids"], by_tokens["finish_reason"]) == (
        (await scripted.post("/tokenize", prompt="it is 8"))["tokens"][:2], "length"
    )


async def test_scripted_errors_and_delays(scripted: Client) -> None:
    error = (await scripted.chat(status=500, **user("a broken one")))["error"]
    assert error["message"] == "out of order"
    slow = asyncio.ensure_future(scripted.chat(**user("slow")))
    other = await scripted.chat(**user("anything"))
    assert not slow.done()
    assert other["choices"][0]["message"]["content"] == "well " * 50
    assert (await slow)["choices"][0]["message"]["content"] == "late"


def test_it_ends_with_its_parent(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"text": "x"}')
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    command = [sys.executable, "-m", "rollstream.services.engine", "--port", "0",
               "--script", str(script), "--parent-pid", str(parent.pid)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "engine ready on" in process.stdout.readline()
    parent.kill()
    parent.wait(10)
    assert process.wait(20) == 0
