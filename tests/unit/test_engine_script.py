"""Scripts: which line answers whom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollstream.services.engine.script import BadScript, Script, load_script


def script(tmp_path: Path, *lines: dict[str, object]) -> Script:
    file = tmp_path / "script.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return load_script(file)


def prompt(*said: str) -> str:
    turns = [f"<|im_start|>user\n{text}<|im_end|>\n" for text in said]
    return "".join(turns) + "<|im_start|>assistant\n"


def test_lines_with_the_same_match_take_turns_for_ever(tmp_path: Path) -> None:
    lines = script(
        tmp_path, {"match": "2 + 2", "text": "4"}, {"match": "sky", "text": "blue"},
        {"match": "2 + 2", "text": "5"},
    )
    sums = [lines.next(prompt("What is 2 + 2?")).text for _ in range(5)]
    assert sums == ["4", "5", "4", "5", "4"]
    assert lines.next(prompt("the sky?")).text == "blue"


def test_only_the_last_user_message_counts(tmp_path: Path) -> None:
    lines = script(tmp_path, {"match": "red", "text": "r"}, {"match": "", "text": "any"})
    assert lines.next(prompt("red", "green")).text == "any"
    assert lines.next(prompt("green", "red")).text == "r"
    assert lines.next("a bare prompt about red").text == "r"


def test_a_prompt_that_nothing_matches(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no line of the script matches 'green'"):
        script(tmp_path, {"match": "red", "text": "r"}).next(prompt("green"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"text": "a"}\n{"texd": "b"}', "line 2: .*texd"),
        ('{"status": "500"}', r"line 1: .*status"),
        ("nonsense", "line 1"),
        ("", "holds no line"),
    ],
)
def test_a_bad_script_names_line_and_field(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(BadScript, match=says):
        load_script(file)
