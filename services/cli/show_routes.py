"""rollstream routes: the routing table as the README's diagram."""

from __future__ import annotations

import argparse
import sys

from rollstream.shared import routes
from rollstream.shared.config import ConfigError, read_file


def main(command: str, argv: list[str]) -> int:
    """Print the table, with the user's rows where a file is given."""
    parser = argparse.ArgumentParser(prog="rollstream routes", description=__doc__)
    parser.add_argument("--config", help="a TOML file with [[route]] rows")
    given = parser.parse_args(argv)
    try:
        print(routes.diagram(routes.load(read_file(given.config).get("route", ()))))
    except ConfigError as error:
        print(f"rollstream routes: {error}", file=sys.stderr)
        return 2
    return 0
