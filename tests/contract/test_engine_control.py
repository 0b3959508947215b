"""The engine over real HTTP: aborts, pauses, new weights, scripts, and the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_server import ASK, Client, addition

from rollstream.services.engine.hugging_face import hugging_face_folder

LONG = {"max_tokens": 1500, "ignore_eos": True, "return_token_ids": True}


async def test_a_client_that_goes_away_stops_its_work(both: Client) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(both.chat(n=4, **LONG), 0.5)
    await both.until("num_requests_running", 0)


@pytest.mark.parametrize("route", ["/abort_requests", "/inference/v1/abort_requests"])
async def test_aborted_requests_answer_with_what_they_have(both: Client, route: str) -> None:
    asked = asyncio.ensure_future(both.chat(**LONG, request_id="kill-me"))
    await both.until("num_requests_running", 1)
    answer = await both.post(route, request_ids=["chatcmpl-kill-me"])
    assert answer == ({"status": "aborted", "aborted": 1} if route == "/abort_requests" else None)
    choice = (await asked)["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) < 1500


async def test_new_weights_between_two_tokens(both: Client, folder: Path) -> None:
    """pause(keep), reload, new version, resume: one answer, two versions."""
    prompt = (await both.post("/tokenize", messages=ASK))["tokens"]
    sampling = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    asked = asyncio.ensure_future(both.generate(prompt, **sampling))
    await both.until("num_requests_running", 1)
    before = await both.metric("generation_tokens_total")
    await both.until("generation_tokens_total", before + 3, before + 40)
    assert await both.post("/pause?mode=keep") == {"status": "paused"}
    assert await both.get("/is_paused") == {"is_paused": True}
    frozen = await both.metric("generation_tokens_total")
    weights = folder if both.backend == "numpy" else hugging_face_folder(folder)
    reloaded = await both.post("/collective_rpc", method="reload_weights",
                               kwargs={"weights_path": str(weights)})
    assert reloaded == {"results": [None]}
    await both.post("/update_weight_version", new_version="step-1")
    assert await both.get("/weight_info") == {"weight_version": "step-1"}
    held = asyncio.ensure_future(both.chat(max_tokens=2))
    await asyncio.sleep(0.2)
    assert not held.done()
    assert await both.metric("generation_tokens_total") == frozen
    await both.post("/resume")
    assert await both.get("/is_paused") == {"is_paused": False}
    spans = (await asked)["choices"][0]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "step-1"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 40)
    assert (await held)["usage"]["completion_tokens"] == 2
    await both.post("/update_weight_version", new_version="default")


async def test_pause_by_waiting_and_by_aborting(both: Client) -> None:
    asked = asyncio.ensure_future(both.chat(max_tokens=15, ignore_eos=True))
    await both.until("num_requests_running", 1)
    await both.post("/pause?mode=wait")
    assert (await asked)["choices"][0]["finish_reason"] == "length"
    await both.post("/resume")
    asked = asyncio.ensure_future(both.chat(**LONG))
    await both.until("num_requests_running", 1)
    await both.post("/pause?mode=abort")
    assert (await asked)["choices"][0]["finish_reason"] == "abort"
    await both.post("/resume")


async def test_an_unknown_way_to_pause_is_refused(engine: Client) -> None:
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
