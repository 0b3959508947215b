"""rollstream check server URL: what an inference server can do, and how to start one that can.

    rollstream check server http://gpu-1:8000/v1
    rollstream check server http://gpu-1:8000/v1 --for rl
    rollstream check server teacher --for teacher --top-k 64 --config rollstream.toml

It asks the server, for about ten tokens; names of `[endpoints.NAME]` work, too.
"""

from __future__ import annotations

import argparse
import sys

from rollstream.shared.config import ConfigError, Parser, parse_flags, read_file
from rollstream.shared.inference.client import InferenceClient
from rollstream.shared.inference.endpoints import Endpoint
from rollstream.shared.inference.fitness import PURPOSES, Need, findings, serve_line, shown
from rollstream.shared.inference.types import Capabilities, InferenceError
from rollstream.shared.settings import check_file, load_settings, service_table

from .connect import run_async

WAIT_S = 10.0
ASK_S = 120.0


def main(command: str, argv: list[str]) -> int:
    """Ask; 0 it can do what it is for, 1 it can't, 2 it could not be asked."""
    parser = Parser(
        prog="rollstream check", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["server"])
    parser.add_argument("URL", help="a URL, or the name of an endpoint in the file")
    parser.add_argument("--model", help="the model's name [the first that the server lists]")
    parser.add_argument("--for", dest="purpose", choices=PURPOSES, help="what it must be able to")
    parser.add_argument("--top-k", type=int, default=None, help="teacher: logprobs a position [1]")
    parser.add_argument("--temperature", type=float, default=1.0, help="rl: of the run [1.0]")
    parser.add_argument("--updates", action="store_true", help="rl: its weights are updated")
    parser.add_argument("--api-key-env", default="", help="the variable that holds the key")
    parser.add_argument("--config", help="a TOML file, as services take it")
    try:
        given = parse_flags(parser, argv)
        endpoint = _endpoint(given["URL"], given["config"], given["api_key_env"])
        urls, key = _reach(endpoint)
        need = Need(
            given["purpose"] or "", top_k=1 if given["top_k"] is None else given["top_k"],
            temperature=given["temperature"], updates=given["updates"],
        )
        found = run_async(lambda: _ask(urls, key, given["model"]))
    except (ConfigError, InferenceError) as error:
        print(f"rollstream check: {error}", file=sys.stderr)
        return 2
    return _tell(urls, given["model"] or next(iter(found.models), "MODEL"), found, need)


def _endpoint(given: str, config: str | None, key: str) -> Endpoint:
    table = read_file(config)
    check_file(table)
    if ":" in given and "://" not in given:
        given = f"http://{given}"
    endpoint = load_settings(service_table(table, ""), {}).endpoint(given)
    if key:
        endpoint.api_key_env, endpoint.api_key_file = key, ""
    return endpoint


def _reach(endpoint: Endpoint) -> tuple[list[str], str | None]:
    try:
        return endpoint.urls, endpoint.api_key()
    except ValueError as error:
        raise ConfigError("URL", "?", str(error)) from error


async def _ask(urls: list[str], key: str | None, model: str | None) -> Capabilities:
    async with InferenceClient(
        urls, api_key=key, max_concurrent=1, request_timeout_s=ASK_S
    ) as client:
        await client.wait_until_up(WAIT_S)
        return await client.capabilities(model)


def _tell(urls: list[str], model: str, found: Capabilities, need: Need) -> int:
    print(f"{found.server or 'server'} at {', '.join(urls)}")
    print(f"models: {', '.join(found.models) or '(it lists none)'}")
    print("\n".join(shown(found)))
    print()
    for purpose in PURPOSES if not need.purpose else [need.purpose]:
        missing = findings(found, need._replace(purpose=purpose))
        print(f"{purpose}: {'yes' if not missing else 'no: ' + '; '.join(missing)}")
    print(f"\na vLLM that can:\n  {serve_line(model, need)}")
    return 1 if need.purpose and findings(found, need) else 0
