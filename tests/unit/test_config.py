"""Flags win over variables, variables over the file; what is wrong is named with its fix."""

import argparse
import re
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from rollstream.shared import config
from rollstream.shared.config import ConfigError


class Inner(msgspec.Struct, frozen=True):
    rate: Annotated[float, Meta(ge=0)] = 1.0
    names: list[str] = []


class Outer(msgspec.Struct, frozen=True):
    size: Annotated[int, Meta(ge=1, description="how many")] = 3
    mode: Literal["fast", "slow"] = "fast"
    maybe: Annotated[int, Meta(ge=1)] | None = None
    table: dict[str, int] = {}
    inner: Inner = Inner()


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file():
    table = {"size": 1, "mode": "slow", "inner": {"rate": 5}}
    variables = {"ROLLSTREAM_SIZE": "2", "ROLLSTREAM_INNER_RATE": "6"}
    found = config.resolve(Outer, table=table, variables=variables, flags={"inner.rate": "7"})
    assert (found.size, found.mode, found.inner.rate) == (2, "slow", 7.0)


@pytest.mark.parametrize(("table", "flags", "words"), [
    ({"sise": 1}, {}, r"sise = \?: no such setting; did you mean size\?"),
    ({"inner": {"rat": 1}}, {}, r"inner.rat .* did you mean inner.rate"),
    ({"inner": 3}, {}, r"inner = 3: write it as a table"),
    ({"size": "x"}, {}, r"size = x: expected `int`, got `str`"),
    ({}, {"size": "0"}, r"--size = 0: expected `int` >= 1"),
    ({}, {"size": "many"}, r"--size = many: give int"),
    ({}, {"mode": "quick"}, r"--mode = quick: use one of: fast, slow"),
    ({}, {"table": "{"}, r"--table = {: give json"),
    ({}, {"maybe": "0"}, r"--maybe = 0"),
])
def test_bad_input_names_field_value_and_fix(table, flags, words):
    with pytest.raises(ConfigError, match=words):
        config.resolve(Outer, table=table, variables={}, flags=flags)


def test_lists_come_with_commas_or_as_json():
    for text in ("a,b", '["a","b"]', "a, b"):
        found = config.resolve(Outer, variables={}, flags={"inner.names": text})
        assert found.inner.names == ["a", "b"]


def test_an_unknown_flag_is_refused_with_the_nearest():
    parser = argparse.ArgumentParser(prog="x", allow_abbrev=False)
    config.add_flags(parser, Outer)
    words = re.escape("--inner.rat = 3: no such flag; did you mean --inner")
    with pytest.raises(ConfigError, match=words):
        config.parse_flags(parser, ["--inner.rat", "3"])
    assert config.parse_flags(parser, ["--inner.rate", "3"])["inner.rate"] == "3"


def test_the_resolved_configuration_is_printable():
    lines = config.printable(Outer(size=9)).splitlines()
    assert lines[0] == "size = 9"
    assert "inner.rate = 1.0" in lines


def test_a_secret_comes_from_a_variable_or_a_file_only(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    monkeypatch.setenv("MY_KEY", "other")
    assert config.read_secret("key", None, str(file)) == "s3cret"
    assert config.read_secret("key", "MY_KEY", None) == "other"
    assert config.read_secret("key", None, None) is None
    with pytest.raises(ConfigError, match="key_env = NO_SUCH: set this"):
        config.read_secret("key", "NO_SUCH", None)
    with pytest.raises(ConfigError, match="key_file"):
        config.read_secret("key", None, str(tmp_path / "absent"))


def test_an_unreadable_file_is_named(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text("a = = 1")
    for path in (bad, tmp_path / "absent.toml"):
        with pytest.raises(ConfigError, match=f"--config = {path}"):
            config.read_file(path)
