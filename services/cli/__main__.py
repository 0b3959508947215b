"""rollstream: the one program.

    rollstream demo                 the whole pipeline on this machine
    rollstream up                   a broker and all services on this machine
    rollstream rl|sft|eval ...      start a run
    rollstream run SERVICE ...      one service, against any broker
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("rollstream.services.cli.demo", "rl, sft and eval runs on this machine, from nothing"),
    "up": ("rollstream.services.cli.up", "a broker and all services on this machine"),
    "rl": ("rollstream.services.cli.start", "start a run: groups for a trainer"),
    "sft": ("rollstream.services.cli.start", "start a run: a dataset"),
    "eval": ("rollstream.services.cli.start", "start a run: a report with pass@k"),
    "start": ("rollstream.services.cli.start", "start a run of a pipeline of your own routes"),
    "run": ("rollstream.services.cli.service", "one service, against any broker"),
    "runs": ("rollstream.services.cli.runs", "list, show, pause, resume, stop or remove runs"),
    "ledger": ("rollstream.services.cli.books", "a run's books: issued = delivered + ..."),
    "dlq": ("rollstream.services.cli.dlq", "a run's dead letters: list, show, redrive"),
    "blobs": ("rollstream.services.cli.blobs", "what of a run's records lies in its object store"),
    "check": ("rollstream.services.cli.check", "what an inference server can do for a run"),
    "routes": ("rollstream.services.cli.show_routes", "the routing table as a diagram"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Hand over to the command's own module; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version"):
        from rollstream import __version__

        print(f"rollstream {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of: {', '.join(COMMANDS)}"
        print(f"rollstream: command = {name}: no such command; {hint}", file=sys.stderr)
        return 2
    if (fault := _unknown_variable()) is not None:
        print(f"rollstream {name}: {fault}", file=sys.stderr)
        return 2
    import importlib
    import logging

    # What goes wrong with the broker is said once, by the command itself.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    command: Callable[[str, list[str]], int] = importlib.import_module(COMMANDS[name][0]).main
    try:
        return command(name, rest)
    except BrokenPipeError:
        # Whoever read our output has enough, e.g. `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _unknown_variable() -> str | None:
    """What is wrong with the ROLLSTREAM_ variables, which services and runs share."""
    from rollstream.shared.config import VARIABLE_PREFIX, ConfigError, check_variables

    if not any(variable.startswith(VARIABLE_PREFIX) for variable in os.environ):
        return None
    from rollstream.services.cli.run_settings import RunSettings
    from rollstream.shared.settings import ServiceSettings

    try:
        check_variables((RunSettings, ServiceSettings), os.environ)
    except ConfigError as error:
        return str(error)
    return None


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([
        "usage: rollstream COMMAND ...   (rollstream COMMAND --help)", "", *lines,
    ])


if __name__ == "__main__":
    sys.exit(main())
