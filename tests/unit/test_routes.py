"""The routing table: what is refused, what a run's stages are, and the README's diagram."""

from pathlib import Path

import pytest

from rollstream.shared import routes
from rollstream.shared.config import ConfigError

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_shows_the_table():
    diagram = routes.diagram(routes.builtin())
    assert diagram in README.read_text()


@pytest.mark.parametrize(("row", "words"), [
    ({"pipeline": "rl", "instance": "scorer", "inptu": "x"}, "did you mean route.input"),
    ({"pipeline": "rl", "instance": "scorrer:b", "input": "rollouts", "output": "b"}, "scorrer"),
    ({"pipeline": "rl", "instance": "scorer", "input": "rollouts", "output": "b"},
     "scored: use one of"),
    ({"pipeline": "rl", "instance": "scorer:b", "input": "rollouts", "output": "scored"},
     "one instance writes a topic"),
    ({"pipeline": "rl", "instance": "scorer:b", "input": "prompts", "output": "b"},
     "it holds Prompt, scorer reads"),
    ({"pipeline": "rl", "instance": "scorer:b", "input": "nothing", "output": "b"}, "use one of"),
    ({"pipeline": "rl", "instance": "scorer:b", "output": "b"}, "name the output that it reads"),
    ({"pipeline": "rl", "instance": "scorer:b", "input": "rollouts"}, "name an output"),
    ({"pipeline": "rl", "instance": "sink:x", "input": "scored", "output": "b"}, "leave output"),
    ({"pipeline": "rl", "instance": "scorer:b", "input": "rollouts", "output": "dlq"}, "taken"),
    ({"pipeline": "rl", "instance": "scorer:b", "input": "b", "output": "b"}, "circle"),
    ({"pipeline": "rl"}, "instance"),
])
def test_a_bad_row_is_refused_with_the_fix(row, words):
    with pytest.raises(ConfigError, match=words):
        routes.load([row])


def test_two_rubrics_and_an_archive_on_the_same_rollouts():
    table = routes.load([
        {"pipeline": "rl", "instance": "scorer:strict", "input": "rollouts", "output": "strict"},
        {"pipeline": "rl", "instance": "scorer:more", "input": "scored", "output": "more"},
        {"pipeline": "rl", "instance": "sink:archive", "input": "strict"},
    ])
    stages = routes.stages(table, "rl", teacher=True)
    assert routes.leaves(stages) == ["trainer", "archive"]


def test_a_stage_left_out_hands_its_input_on():
    table = routes.builtin()
    with_teacher = {s.instance: s.input for s in routes.stages(table, "rl", teacher=True)}
    without = {s.instance: s.input for s in routes.stages(table, "rl", teacher=False)}
    assert with_teacher["sink:trainer"] == "distilled"
    assert without["sink:trainer"] == "scored"
    assert "teacher-distiller" not in without


def test_an_unknown_pipeline_names_those_that_exist():
    with pytest.raises(ConfigError, match="rl, sft, eval"):
        routes.stages(routes.builtin(), "rll", teacher=False)


def test_an_instance_that_is_there_already_is_replaced_once():
    row = {"pipeline": "sft", "instance": "sink:dataset", "input": "scored"}
    table = routes.load([row])
    assert [r.input for r in table if r.instance == "sink:dataset"] == ["scored"]
    with pytest.raises(ConfigError, match="give this instance its own name"):
        routes.load([row, row])
