"""What a server lacks for a purpose, and the vLLM command line that has it (pure).

Flags are those of vLLM 0.32; a server of another make simply has the capability or not.
"""

from __future__ import annotations

from typing import NamedTuple

from rollstream.shared.inference.types import Capabilities

PURPOSES = ("rl", "sft", "eval", "teacher")
DEFAULT_MAX_LOGPROBS = 20
"""vLLM's own, for sampled and for prompt tokens."""

SCALE_OUT = "--enable-scale-out"
PROCESSED = "--logprobs-mode processed_logprobs"
DEV_MODE = "VLLM_SERVER_DEV_MODE=1"


class Need(NamedTuple):
    """What a server is for."""

    purpose: str = ""
    """One of PURPOSES; empty: whatever it can."""
    top_k: int = 1
    """Of a teacher."""
    temperature: float = 1.0
    updates: bool = False
    """Its weights are updated while it serves."""


class _Row(NamedTuple):
    what: str
    has: bool
    turned_on_by: str
    key: str
    """In `Capabilities.detail`."""


def _rows(found: Capabilities) -> list[_Row]:
    mode = f" ({found.logprobs_mode})" if found.logprobs_mode else ""
    limit = f", up to {found.max_prompt_logprobs} a position" if found.prompt_logprobs else ""
    return [
        _Row("token ids with sampled logprobs", found.token_ids, "a vLLM", "token_ids"),
        _Row(f"logprobs are the sampler's own{mode}", found.logprobs_mode == "processed",
             PROCESSED, "logprobs_mode"),
        _Row("tokens in, tokens out, with their policy versions", found.generate_route, SCALE_OUT,
             "generate_route"),
        _Row("tool calls and reasoning parsed from tokens", found.derender,
             f"{SCALE_OUT} --enable-auto-tool-choice --tool-call-parser NAME", "derender"),
        _Row("tokenize: multi-turn without a drift", found.tokenize, "a vLLM", "tokenize"),
        _Row(f"prompt logprobs{limit}", found.prompt_logprobs, "a vLLM", "prompt_logprobs"),
        _Row("weights' version and updates", found.weight_version, DEV_MODE, "weight_version"),
    ]


def shown(found: Capabilities) -> list[str]:
    """A line for each capability: whether it is there, else the flag and the server's words."""
    rows = _rows(found)
    width = max(len(row.what) for row in rows)
    lines = []
    for row in rows:
        why = str(found.detail.get(row.key, ""))[:90]
        missing = f"no   {row.turned_on_by}" + (f"   ({why})" if why else "")
        lines.append(f"  {row.what:<{width}}  {'yes' if row.has else missing}")
    return lines


def findings(found: Capabilities, need: Need) -> list[str]:
    """What it lacks for the purpose; empty where it will do."""
    missing = []
    if need.purpose == "rl":
        if not found.token_ids:
            missing.append("it returns no token ids: use vLLM")
        elif found.logprobs_mode == "raw" and need.temperature != 1:
            missing.append(f"its logprobs are not the sampler's: {PROCESSED}, or temperature 1")
        if need.updates and not found.weight_version:
            missing.append(f"nobody can tell which weights it has: {DEV_MODE}")
    if need.purpose == "teacher":
        if not found.prompt_logprobs:
            missing.append("it returns no prompt logprobs: use vLLM")
        elif need.top_k > found.max_prompt_logprobs:
            missing.append(f"it allows {found.max_prompt_logprobs} a position: "
                           f"--max-logprobs {need.top_k}")
    return missing


def serve_line(model: str, need: Need) -> str:
    """The command that starts a vLLM which can do all that is needed."""
    words = ["vllm serve", model]
    if need.purpose in ("", "rl"):
        words += [SCALE_OUT, PROCESSED]
    if need.purpose in ("", "teacher") and need.top_k > DEFAULT_MAX_LOGPROBS:
        words.append(f"--max-logprobs {need.top_k}")
    if need.updates or not need.purpose:
        words.insert(0, DEV_MODE)
    return " ".join(words)
