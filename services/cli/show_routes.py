"""rollstream routes: the routing table as the README's diagram."""

from __future__ import annotations

import sys

from rollstream.shared import routes
from rollstream.shared.config import ConfigError, Parser, parse_flags, read_file
from rollstream.shared.settings import check_file


def main(command: str, argv: list[str]) -> int:
    """Print the table, with the user's rows where a file is given."""
    parser = Parser(prog="rollstream routes", description=__doc__)
    parser.add_argument("--config", help="a TOML file with [[route]] rows")
    try:
        table = read_file(parse_flags(parser, argv)["config"])
        check_file(table)
        print(routes.diagram(routes.load(table.get("route", ()))))
    except ConfigError as error:
        print(f"rollstream routes: {error}", file=sys.stderr)
        return 2
    return 0
