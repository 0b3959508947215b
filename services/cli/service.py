"""rollstream run SERVICE: one service process."""

from __future__ import annotations

import sys

from rollstream.shared.config import ConfigError
from rollstream.shared.serve import main as serve
from rollstream.shared.service import installed


def main(command: str, argv: list[str]) -> int:
    """Run the service named first; its exit code."""
    if not argv or argv[0].startswith("-"):
        if argv and argv[0] in ("-h", "--help"):
            known = ", ".join(sorted(installed()))
            print(f"usage: rollstream run SERVICE ...   services: {known}")
            return 0
        argv = ["(not given)"]
    name, *rest = argv
    if name not in installed():
        known = ", ".join(sorted(installed()))
        print(f"rollstream run: {ConfigError('service', name, f'use one of: {known}')}",
              file=sys.stderr)
        return 2
    return serve(name, rest)
