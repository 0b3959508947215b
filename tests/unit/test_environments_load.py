"""Loading environments and reading their rows; every way it can go wrong says so in one line."""

import importlib
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollstream.shared.environments.rows import to_input, to_row
from rollstream.shared.environments.v0 import (
    EnvironmentUnusable,
    load,
    own_environments,
    parse_args,
)

ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset

RECORDS = [
    {"question": "q0", "answer": 3, "info": '{"level": 2}', "hint": {"x": [1, None]}},
    {"question": "q1", "answer": 4, "info": '{"level": 1}', "hint": {"x": []}},
]

def load_environment(records=None, rename=None):
    dataset = Dataset.from_list(RECORDS if records is None else records)
    if rename:
        dataset = dataset.rename_column("question", rename)
    return vf.SingleTurnEnv(
        dataset=lambda: dataset, system_prompt="be brief", rubric=vf.Rubric(funcs=[lambda: 1.0])
    )
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(folder: Path, name: str, source: str) -> str:
    (folder / f"{name}.py").write_text(source)
    importlib.invalidate_caches()
    sys.modules.pop(name, None)
    return name


def test_our_own_environments_are_found_by_id() -> None:
    assert own_environments() == ["group_ranking", "tool_addition", "two_digit_addition"]
    for env_id in own_environments():
        env = load(env_id, {"num_train": 4, "num_eval": 3})
        assert (len(env.rows("train")), len(env.rows("eval"))) == (4, 3)
        assert not env.rows("eval").fell_back


def test_two_digit_addition_is_what_the_model_was_measured_on() -> None:
    env = load("two-digit-addition", {})
    row = env.rows("train")[0]
    roles = [message["role"] for message in row.prompt]
    assert roles == ["system", *["user", "assistant"] * 4, "user"]
    assert row.prompt[0]["content"] == "Answer with the equation."
    assert row.prompt[2]["content"] == "12 + 25 = 37"
    a, b = (int(word.strip("?")) for word in row.question.split() if word.strip("?").isdigit())
    assert row.question == f"What is {a} + {b}?"
    assert row.answer == str(a + b)
    train = {one.question for one in env.rows("train")}
    held_out = {one.question for one in env.rows("eval")}
    assert (len(train), len(held_out), len(train & held_out)) == (1000, 100, 0)


def test_an_installed_module_wins_over_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "group_ranking", raising=False)
    write(folder, "group_ranking", ENVIRONMENT)
    assert len(load("group_ranking", {}).rows("train")) == 2
    monkeypatch.delitem(sys.modules, "group_ranking", raising=False)


def test_loading_keeps_signal_handlers_and_works_in_any_thread() -> None:
    def ours(*_: object) -> None: ...

    before = {number: signal.signal(number, ours) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        load("group_ranking", {})
        assert signal.getsignal(signal.SIGTERM) is ours
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    loaded: list[object] = []
    thread = threading.Thread(target=lambda: loaded.append(load("group_ranking", {})))
    thread.start()
    thread.join(60)
    assert loaded


def test_the_fingerprint_follows_id_args_and_source(folder: Path) -> None:
    write(folder, "fp_env", ENVIRONMENT)
    same = {load("fp_env", {}).ref.fingerprint for _ in range(2)}
    args = load("fp_env", {"rename": None}).ref.fingerprint
    write(folder, "fp_env", ENVIRONMENT + "\n# changed\n")
    source = load("fp_env", {}).ref.fingerprint
    assert len(same) == 1
    assert len(same | {args, source}) == 3


def test_rows_keep_everything(folder: Path) -> None:
    env = load(write(folder, "rows_env", ENVIRONMENT), {})
    rows = env.rows("train")
    row = rows[0]
    assert row.prompt == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "q0"},
    ]
    assert (row.answer, row.info, row.example_id) == ("3", {"level": 2}, 0)
    assert row.columns == {"question": "q0", "answer": 3, "hint": {"x": [1, None]}}
    assert to_input(row)["answer"] == 3, "reward functions get the answer's own type"
    assert [one.question for one in rows] == ["q0", "q1"]
    assert rows[-1] == rows[1]
    with pytest.raises(IndexError):
        rows[2]
    eval_rows = env.rows("eval")
    assert eval_rows.fell_back
    assert list(eval_rows) == list(rows)


def test_the_dataset_fingerprint_follows_content_and_order(folder: Path) -> None:
    name = write(folder, "ds_env", ENVIRONMENT)
    one, two = {"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}
    prints = [
        load(name, {"records": records}).dataset_fingerprint("train")
        for records in ([one, two], [one, two], [two, one], [one, {**two, "answer": "3"}])
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_a_row_comes_back_as_verifiers_input() -> None:
    record = {
        "prompt": [{"role": "user", "content": "hi", "name": None}], "example_id": 7,
        "answer": None, "info": {"a": 1}, "task": '{"goal": "x"}', "score": float("nan"),
    }
    row = to_row(record)
    assert row.answer is None
    assert to_input(row) == {
        "prompt": [{"role": "user", "content": "hi"}], "example_id": 7, "answer": None,
        "info": {"a": 1}, "task": '{"goal": "x"}', "score": None,
    }
    assert "answer" not in to_input(to_row({"prompt": "hi"}))
    assert "task" not in to_input(to_row({"prompt": "hi", "task": "default"}))
    with pytest.raises(ValueError, match=r"column 'blob' .*bytes"):
        to_row({"prompt": "hi", "blob": b"\0"})


@pytest.mark.parametrize(
    ("source", "args", "message"),
    [
        ("", {}, "has no load_environment function"),
        ("import not_there", {}, "ModuleNotFoundError: No module named 'not_there'"),
        ("1 / 0", {}, "raised ZeroDivisionError: division by zero"),
        ("raise SystemExit('no key')", {}, "raised SystemExit: no key"),
        ("def load_environment(size=1): raise OSError('no disk')", {}, "OSError: no disk"),
        ("def load_environment(size=1): ...", {"sise": 2}, "'sise'; load_environment takes size=1"),
        ("def load_environment(size): ...", {}, "'size'; load_environment takes size"),
        ("def load_environment(): return 3", {}, "load_environment({}) failed"),
        (ENVIRONMENT, {"rename": [1]}, "load_environment({\"rename\":[1]}) failed"),
        (ENVIRONMENT, {"rename": (1,)}, "args must be a JSON object"),
        (ENVIRONMENT, {"records": []}, "its train dataset is empty: check args {\"records\":[]}"),
        (ENVIRONMENT, {"rename": "ask"}, "neither a 'prompt' nor a 'question' column"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    folder: Path, source: str, args: dict, message: str
) -> None:
    write(folder, "wrong_env", source)
    with pytest.raises(EnvironmentUnusable) as caught:
        load("wrong_env", args).rows("train")
    text = str(caught.value)
    assert message in text
    assert text.startswith("environment 'wrong_env': ")
    assert "\n" not in text
    assert caught.value.env == "wrong_env"


def test_an_unknown_environment_names_the_nearest_and_how_to_install() -> None:
    with pytest.raises(EnvironmentUnusable) as caught:
        load("someone/two-digit-adition", {})
    assert "did you mean 'two_digit_addition'?" in str(caught.value)
    assert "pip install two-digit-adition" in str(caught.value)
    with pytest.raises(EnvironmentUnusable, match="no module can have this name"):
        load("two digit addition", {})


def test_args_from_a_command_line() -> None:
    assert parse_args("x", '{"n": 1}') == {"n": 1}
    assert parse_args("x", "") == {}
    for text in ("{n: 1}", "[1]"):
        with pytest.raises(EnvironmentUnusable, match="environment 'x': args"):
            parse_args("x", text)


def test_several_threads_may_load_the_same_environment_at_once(tmp_path, monkeypatch):
    """Runs start together: a module that is being imported must not be taken for a whole one."""
    folder = tmp_path / "slow_to_import"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "import time\ntime.sleep(0.5)\nfrom two_digit_addition import load_environment\n"
    )
    load("two_digit_addition", {})
    monkeypatch.setattr("rollstream.shared.environments.locate.OWN_FOLDER", tmp_path)
    with ThreadPoolExecutor(3) as pool:
        loaded = list(pool.map(lambda _: load("slow_to_import", {}), range(3)))
    assert len({environment.ref.fingerprint for environment in loaded}) == 1
