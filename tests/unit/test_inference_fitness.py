"""What a server lacks is told with the flag that turns it on."""

import msgspec
import pytest

from rollstream.shared.inference.fitness import Need, findings, serve_line, shown
from rollstream.shared.inference.types import Capabilities

ALL = Capabilities(
    models=["m"], generate_route=True, token_ids=True, logprobs=True, logprobs_mode="processed",
    prompt_logprobs=True, max_prompt_logprobs=20, tokenize=True, derender=True,
    weight_version=True, context_tokens=2048,
)
TEXT_ONLY = Capabilities(models=["m"], detail={"token_ids": "Unrecognized argument"})


@pytest.mark.parametrize(("found", "need", "says"), [
    (ALL, Need("rl", updates=True), []),
    (ALL, Need("teacher", top_k=20), []),
    (TEXT_ONLY, Need("sft"), []),
    (TEXT_ONLY, Need("eval"), []),
    (TEXT_ONLY, Need("rl"), ["no token ids"]),
    (TEXT_ONLY, Need("rl", updates=True), ["no token ids", "VLLM_SERVER_DEV_MODE=1"]),
    (TEXT_ONLY, Need("teacher"), ["no prompt logprobs"]),
    (ALL, Need("teacher", top_k=64), ["--max-logprobs 64"]),
    (msgspec.structs.replace(ALL, logprobs_mode="raw"), Need("rl"), []),
    (msgspec.structs.replace(ALL, logprobs_mode="raw"), Need("rl", temperature=0.7),
     ["--logprobs-mode processed_logprobs"]),
])
def test_what_is_missing_names_the_flag(found: Capabilities, need: Need, says: list[str]):
    missing = findings(found, need)
    assert len(missing) == len(says)
    assert all(word in line for word, line in zip(says, missing, strict=True))


def test_each_capability_is_a_line():
    assert all(line.endswith("yes") for line in shown(ALL))
    lines = shown(TEXT_ONLY)
    assert len(lines) == len(shown(ALL))
    assert all("  no   " in line for line in lines)
    assert "Unrecognized argument" in lines[0]
    assert "--enable-scale-out" in lines[2]


@pytest.mark.parametrize(("need", "line"), [
    (Need("sft"), "vllm serve m"),
    (Need("rl"), "vllm serve m --enable-scale-out --logprobs-mode processed_logprobs"),
    (Need("teacher", top_k=64), "vllm serve m --max-logprobs 64"),
    (Need(), "VLLM_SERVER_DEV_MODE=1 vllm serve m --enable-scale-out --logprobs-mode "
             "processed_logprobs"),
])
def test_the_command_line_has_what_is_needed(need: Need, line: str):
    assert serve_line("m", need) == line
