"""Bad input refused before anything is looked at: one line, exit code 2, no secret."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollstream.services.cli.__main__ import COMMANDS, main
from rollstream.shared.service import installed
from rollstream.shared.settings import BROKERS_VARIABLE

ENV = ["sft", "--env", "two_digit_addition", "--model", "m"]
SECRET = "sk-do-not-print-me"
FILES = {
    "run_is_3": "run = 3",
    "route_is_3": "route = 3",
    "unknown_route": '[[route]]\npipeline = "sft"\ninstance = "scorre"\ninput = "rollouts"',
    "unknown_table": '[rnu]\nenv = "two_digit_addition"',
    "unknown_key": "[run]\ngruop_size = 3",
    "run_group_size_0": "[run]\ngroup_size = 0",
    "unknown_service_key": "[scorer]\nwokers = 3",
    "section_is_3": "scorer = 3",
    "endpoints_is_3": "endpoints = 3",
    "no_url": '[endpoints.default]\napi_key_env = "KEY"',
    "secret_key": f'[endpoints.default]\nurl = "http://localhost:1"\napi_key = "{SECRET}"',
    "secret_url": f'[endpoints.default]\nurl = "http://me:{SECRET}@localhost:1"',
    "deep": "a = " + "[" * 50_000,
    "huge": "# " + "x" * 2_000_000,
    "long_number": "a = " + "9" * 10_000,
    "empty": "",
}


@dataclass
class Case:
    """Arguments and variables, and what the line on stderr must say."""

    arguments: list[str]
    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def scorer(*flags: str) -> list[str]:
    return ["run", "scorer", *flags]


CASES = [
    Case(["sfft"], ["command = sfft: no such command; did you mean sft?"]),
    Case(["start"], ["PIPELINE = (not given)"]),
    Case(["run"], ["service = (not given): use one of: generator"]),
    Case(["run", "nosuch"], ["service = nosuch: use one of: generator"]),
    Case(["sft"], ["--env = (not given): give an environment id"]),
    Case(["sft", "--env", "e"], ["--model = (not given): give the model's name"]),
    Case([*ENV, "--group-size", "0"], ["--group-size = 0: expected `int` >= 1"]),
    Case([*ENV, "--group-size", "many"], ["--group-size = many: give int"]),
    Case(["rl", *ENV[1:], "--batch-size", "12"], ["--batch-size = 12: make it a multiple"]),
    Case([*ENV, "--seed", "1" + "0" * 30], ["--seed = 1000", "at most 64 bits"]),
    Case([*ENV, "--sampling.temperature", "inf"], ["--sampling.temperature = inf: give a finite"]),
    Case([*ENV, "--run", "Two Words"], ["--run = Two Words: use 1 to 63 of a-z"]),
    Case([*ENV, "--endpoint", "a\nb"], ["--endpoint = a b: give printable text"]),
    Case([*ENV, "--dataset", "\udcff"], ["--dataset = ?: give printable text"]),
    Case([*ENV, "--env-args", "{seed: 1}"], ["--env-args = {seed: 1}: give json"]),
    Case([*ENV, "--env-args", "[1]"], ["--env-args = [1]: expected `object`"]),
    Case([*ENV, "--env-args", "[" * 100_000], ["--env-args = [[", "...: give json"]),
    Case([*ENV, "--environments", '[{"id": "a", "wieght": 2}]'],
         ["--environments.0.wieght", "did you mean --environments.0.weight?"]),
    Case([*ENV, "--dataset", "rows.jsonl"], ["--dataset = rows.jsonl: give an environment or a"]),
    Case([*ENV, "--gruop-size", "3"], ["--gruop-size = 3: no such flag; did you mean --group"]),
    Case([*ENV, "--model"], ["--model = (not given): expected one argument"]),
    Case([*ENV, "stray"], ["argument = stray: no such argument"]),
    Case([*ENV, "--api-key", SECRET], ["--api-key = ?: no such flag"]),
    Case(ENV, ["ROLLSTREAM_GRUOP_SIZE = ?", "did you mean ROLLSTREAM_GROUP_SIZE?"],
         {"ROLLSTREAM_GRUOP_SIZE": "3"}),
    Case(ENV, ["ROLLSTREAM_GROUP_SIZE = 0: expected `int` >= 1"], {"ROLLSTREAM_GROUP_SIZE": "0"}),
    Case(ENV, ["ROLLSTREAM_API_KEY = ?"], {"ROLLSTREAM_API_KEY": SECRET}),
    Case(["rl", *ENV[1:], "--teacher.endpoint", "default"], ["--teacher.model = (not given)"]),
    Case(["rl", *ENV[1:], "--teacher.model", "m"], ["--teacher.endpoint = (not given)"]),
    Case(["rl", *ENV[1:], "--teacher.top-k", "3"], ["--teacher.endpoint = (not given)"]),
    Case(["eval", *ENV[1:], "--teacher.endpoint", "default", "--teacher.model", "m"],
         ["eval has no teacher"]),
    Case([*ENV, "--endpoint", f"http://me:{SECRET}@localhost:1"],
         ["--endpoint = ?: credentials in a URL end up in logs"]),
    Case([*ENV, "--config", "absent.toml"], ["absent.toml: give a readable TOML file"]),
    Case([*ENV, "--config", "binary.toml"], ["binary.toml: give a readable TOML file"]),
    Case([*ENV, "--config", "/dev/zero"], ["/dev/zero", "larger than 1048576 bytes"]),
    *(Case([*ENV, "--config", f"{name}.toml"], words) for name, words in {
        "deep": ["--config = deep.toml: give a TOML file less deeply nested"],
        "huge": ["--config = huge.toml", "larger than 1048576 bytes"],
        "long_number": ["--config = long_number.toml: give a readable TOML file"],
        "run_is_3": ["run = 3: write it as a table [run]"],
        "route_is_3": ["route = 3: write each row as a table [[route]]"],
        "unknown_route": ["route sft/scorre"],
        "unknown_table": ["rnu = ?: no such setting; did you mean run?"],
        "unknown_key": ["gruop_size = ?: no such setting; did you mean group_size?"],
        "run_group_size_0": ["group_size = 0: expected `int` >= 1"],
        "empty": ["--brokers = (not given)"],
    }.items()),
    Case(["runs"], ["required: action"]),
    Case(["runs", "explode"], ["action = explode: choose from 'list'"]),
    Case(["runs", "list", "--prefx", "p"], ["--prefx = p: no such flag; did you mean --prefix?"]),
    Case(["runs", "list"], ["--brokers = (not given): give host:port"]),
    Case(["ledger"], ["required: RUN"]),
    Case(["routes", "--config", "route_is_3.toml"], ["route = 3: write each row"]),
    Case(["demo", "--rl-batches", "0"], ["--rl-batches = 0: give at least 1"]),
    Case(["up", "--broker", "rabbit"], ["--broker = rabbit: choose from 'embedded', 'kafka'"]),
    Case(["up", "--bruker", "kafka"], ["--bruker = kafka: no such flag; did you mean --broker"]),
    Case(scorer("--brokers", "localhost:1", "--instance", "sink:x"),
         ["--instance = sink:x: give scorer or scorer:NAME"]),
    Case(scorer("--run", "Two Words"), ["run = Two Words: use 1 to 63 of a-z"]),
    Case(scorer("--max-in-flight", "0"), ["--max-in-flight = 0: expected `int` >= 1"]),
    Case(scorer("--wokers", "3"), ["--wokers = 3: no such flag; did you mean --workers?"]),
    Case(scorer("--security.sasl-password", SECRET), ["--security.sasl-password = ?: no such"]),
    Case(scorer("--endpoints", '{"default": 3}'), ["--endpoints[...] = ?: expected `object`"]),
    Case(scorer(), ["--brokers = (not given): give host:port"]),
    *(Case(scorer("--config", f"{name}.toml"), words) for name, words in {
        "unknown_service_key": ["wokers = ?: no such setting; did you mean workers?"],
        "section_is_3": ["scorer = 3: write it as a table [scorer]"],
        "endpoints_is_3": ["endpoints = 3: write it as a table [endpoints]"],
        "no_url": ["endpoints[...].url = (not given): give it"],
        "secret_key": ["endpoints.default.api_key = ?", "did you mean endpoints.default.api_key_e"],
        "secret_url": ["endpoints.default.url = ?: credentials in a URL end up in logs"],
    }.items()),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the files, and no variable of ours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(BROKERS_VARIABLE, raising=False)
    for name, text in FILES.items():
        Path(f"{name}.toml").write_text(text)
    Path("binary.toml").write_bytes(bytes(range(256)))
    return tmp_path


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case.arguments)[:60])
def test_it_is_refused_in_one_line(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in case.variables.items():
        monkeypatch.setenv(name, value)
    assert main(case.arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1, said.err
    assert len(said.err) < 1500
    assert said.err.startswith("rollstream")
    for words in case.words:
        assert words in said.err
    assert SECRET not in said.err
    assert {path.suffix for path in folder.iterdir()} <= {".toml", ""}
    assert not (folder / "runs" / "up.json").exists()


@pytest.mark.parametrize("arguments", [
    [], *([name] for name in COMMANDS if name not in ("run", "start")),
    ["run"], ["start"], ["start", "sft"], *(["run", name] for name in sorted(installed())),
], ids=" ".join)
def test_help_ends_with_0(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("INFERENCE_API_KEY", SECRET)
    try:
        code = main([*arguments, "--help"])
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    said = capsys.readouterr()
    assert "usage: rollstream" in said.out
    assert said.err == ""
    assert SECRET not in said.out


@pytest.mark.parametrize("service", sorted(installed()))
def test_each_service_is_a_module_of_its_own(service: str):
    module = f"rollstream.services.{service.replace('-', '_')}"
    done = subprocess.run([sys.executable, "-m", module, "--help"], check=False, timeout=60,
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: rollstream run {service}" in done.stdout


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """What `--print-config` tells, by name, as JSON text."""
    assert main([*arguments, "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return dict(line.split(" = ", 1) for line in lines)


def test_a_flag_wins_over_a_variable_over_the_file_for_a_service(monkeypatch, capsys):
    Path("own.toml").write_text(
        'brokers = "file:1"\nworkers = 2\nmax_in_flight = 2\nhealth_port = 2\n'
        "[scorer]\nmax_in_flight = 3\n[sink]\nmax_in_flight = 9\n"
    )
    flags = ["run", "scorer", "--config", "own.toml"]
    found = printed(capsys, *flags)
    assert (found["workers"], found["max_in_flight"], found["brokers"]) == ("2", "3", '"file:1"')
    monkeypatch.setenv("ROLLSTREAM_MAX_IN_FLIGHT", "4")
    monkeypatch.setenv(BROKERS_VARIABLE, "variable:1")
    found = printed(capsys, *flags)
    assert (found["max_in_flight"], found["brokers"]) == ("4", '"variable:1"')
    found = printed(capsys, *flags, "--max-in-flight", "5", "--brokers", "flag:1")
    assert (found["max_in_flight"], found["brokers"]) == ("5", '"flag:1"')
    assert found["health_port"] == "2"


def test_a_flag_wins_over_a_variable_over_the_file_for_a_run(monkeypatch, capsys):
    Path("own.toml").write_text(
        'brokers = "file:1"\n[run]\ngroup_size = 2\n[run.sampling]\nmax_tokens = 2\n'
    )
    flags = [*ENV, "--config", "own.toml"]
    found = printed(capsys, *flags)
    assert (found["group_size"], found["sampling.max_tokens"]) == ("2", "2")
    assert found["brokers"] == '"file:1"'
    monkeypatch.setenv("ROLLSTREAM_SAMPLING_MAX_TOKENS", "3")
    monkeypatch.setenv(BROKERS_VARIABLE, "variable:1")
    found = printed(capsys, *flags)
    assert (found["group_size"], found["sampling.max_tokens"]) == ("2", "3")
    assert found["brokers"] == '"variable:1"'
    assert printed(capsys, *flags, "--sampling.max-tokens", "4")["sampling.max_tokens"] == "4"


def test_endpoints_come_from_the_file_and_a_key_stays_where_it_is(monkeypatch, capsys):
    monkeypatch.setenv("INFERENCE_API_KEY", SECRET)
    Path("key").write_text(SECRET)
    Path("own.toml").write_text(
        '[endpoints.default]\nurl = "http://a:1/v1"\napi_key_env = "INFERENCE_API_KEY"\n'
        '[endpoints.teacher]\nurl = ["http://b:1", "http://c:1"]\napi_key_file = "key"\n'
        '[endpoints.short]\nurl = "d:1"\n'
    )
    found = printed(capsys, "run", "generator", "--config", "own.toml")
    endpoints = json.loads(found["endpoints"])
    assert sorted(endpoints) == ["default", "short", "teacher"]
    assert endpoints["default"]["api_key_env"] == "INFERENCE_API_KEY"
    assert endpoints["teacher"]["url"] == ["http://b:1", "http://c:1"]
    assert SECRET not in str(found)
