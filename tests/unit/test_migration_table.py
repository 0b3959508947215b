"""docs/migrating-from-atropos.md against the code: what it names exists, what it states holds.

The document's own section "Reading the tables" is the grammar that is read here.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import pytest
from making import run

from rollstream.services.cli import propose, start, up
from rollstream.services.cli.__main__ import COMMANDS
from rollstream.services.cli.run_settings import RunSettings, load_run_settings, to_config
from rollstream.services.cli.runs import ACTIONS
from rollstream.services.engine import options as engine
from rollstream.services.sink.dataset import write_dataset
from rollstream.services.sink.parts import FullLine
from rollstream.services.sink.report import Tallies, metrics_file, sample_lines, write_report
from rollstream.services.sink.trainer import TrainerLeaf
from rollstream.services.sink.trainer_api import Registration, TrainerApi
from rollstream.services.sink.trajectories import scored_data_group
from rollstream.shared import config, routes, serve
from rollstream.shared.config import ConfigError, settings_of
from rollstream.shared.inference.endpoints import Endpoint
from rollstream.shared.records import Distilled, EnvRef, Group, Outcome, Row, Sample, Stop
from rollstream.shared.runs import EnvironmentSource, SinkSettings
from rollstream.shared.settings import (
    BROKERS_VARIABLE,
    ServiceSettings,
    file_keys,
    load_settings,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating-from-atropos.md"
PIPELINES = ("rl", "sft", "eval")
NONE, NOT_YET = "—", "not yet"

# What a user of the originals may have set or read, with its default as Python writes it.
# From environments/verifiers_server.py (commit 5b09ad86): VfEnvConfig and config_init; from
# atroposlib/envs/teacher_distillation_env.py (09ad4019): TeacherDistillationConfig; from
# atroposlib 0.4.0: the classes that those two build on.
VF_ENV_CONFIG = {"vf_env_name": '""', "env_args": "{}"}
CONFIG_INIT_ENV = {
    "tokenizer_name": '"Qwen/Qwen2.5-1.5B-Instruct"', "group_size": "8", "use_wandb": "True",
    "rollout_server_url": '"http://localhost:8000"', "total_steps": "1000", "batch_size": "4",
    "steps_per_eval": "100", "max_token_length": "2048", "wandb_name": '"verifiers"',
}
CONFIG_INIT_SERVER = {
    "model_name": '"gpt-4.1-nano"', "base_url": '"https://api.openai.com/v1"', "api_key": '"x"',
    "num_requests_for_eval": "4",
}
TEACHER_DISTILLATION_CONFIG = {
    "teacher_enabled": "False", "teacher_base_url": "None", "teacher_model_name": "None",
    "teacher_api_key": '""', "teacher_server_type": '"vllm"', "teacher_tokenizer_name": '"none"',
    "teacher_top_k": "1",
}
BASE_ENV_CONFIG = {
    "group_size": "4", "max_num_workers": "-1", "max_eval_workers": "16",
    "max_num_workers_per_node": "8", "steps_per_eval": "100", "max_token_length": "2048",
    "eval_handling": "STOP_TRAIN", "eval_limit_ratio": "0.5", "inference_weight": "1.0",
    "batch_size": "-1", "max_batches_offpolicy": "3",
    "tokenizer_name": '"NousResearch/DeepHermes-3-Llama-3-3B-Preview"', "use_wandb": "True",
    "rollout_server_url": '"http://localhost:8000"', "total_steps": "1000", "wandb_name": "None",
    "num_rollouts_to_keep": "32", "num_rollouts_per_group_for_logging": "1",
    "ensure_scores_are_not_same": "True", "data_path_to_save_groups": "None",
    "data_dir_to_save_evals": "None", "min_items_sent_before_logging": "2",
    "include_messages": "False", "min_batch_allocation": "None", "worker_timeout": "600",
    "thinking_mode": "False", "reasoning_effort": "None", "max_reasoning_tokens": "None",
    "custom_thinking_prompt": "None",
}
API_SERVER_CONFIG = {
    "timeout": "1200", "num_max_requests_at_once": "512", "num_requests_for_eval": "64",
    "model_name": '"default"', "rolling_buffer_length": "1000", "server_type": '"openai"',
    "tokenizer_name": '"none"', "api_key": '""', "base_url": '""', "n_kwarg_is_ignored": "False",
    "health_check": "True",
}
ORIGINALS: list[tuple[str, dict[str, str]]] = [
    ("The environment", {f"--env.{k}": v for k, v in VF_ENV_CONFIG.items()}),
    ("Run settings", {f"--env.{k}": v for k, v in BASE_ENV_CONFIG.items()}),
    ("Run settings", {f"--env.{k}": v for k, v in CONFIG_INIT_ENV.items()}),
    ("Inference servers", {f"--openai.{k}": v for k, v in API_SERVER_CONFIG.items()}),
    ("Inference servers", {f"--openai.{k}": v for k, v in CONFIG_INIT_SERVER.items()}),
    ("Inference servers", {"max_n_completions": "8", "proxy_url": "None"}),
    ("Teacher", {f"--env.{k}": v for k, v in TEACHER_DISTILLATION_CONFIG.items()}),
    ("Command line and configuration", dict.fromkeys(
        ["serve", "process", "evaluate", "--env.*", "--openai.*"], "")
        | {"--slurm": "False", "--testing": "False", "--config": "None"}),
    ("Environment variables", dict.fromkeys([
        "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "ATROPOS_PROXY_URL", "ATROPOS_DEBUG_REQUESTS",
        "SLURM_JOB_NODELIST", "NUM_TRAINING_NODES", "INFER_TP"], "")),
    ("Evaluation files", dict.fromkeys([
        "metrics.json", "samples.jsonl", "evaluate_config.yaml", "config_general", "results",
        "model_name", "total_evaluation_time_seconds", "generation_parameters", "messages",
        "eval/avg_total_score", "question", "gold_answer", "model_parsed", "score", "correct",
        "finish_reason"], "")),
    ("Weights & Biases metrics", dict.fromkeys([
        "train/percent_correct", "eval/avg_total_score", "train/completion_lengths",
        "train/completion_lengths_std", "train/completion_lengths_max",
        "train/completion_lengths_min", "train/completion_lengths_p95", "train/rollouts",
        "train/items_sent_to_api", "train/items_rejected", "train_perf/task_duration",
        "train_perf/succeeded_task_duration", "train_perf/failed_task_duration",
        "train_perf/mainloop_timings", "train_perf/workers_added_per_attempt"], "")),
    ("Trainer HTTP API", dict.fromkeys([
        "GET /", "POST /register", "GET /batch", "GET /info", "GET /wandb_info", "GET /status",
        "POST /register-env", "POST /disconnect-env", "GET /status-env", "POST /scored_data",
        "POST /scored_data_list", "GET /latest_example", "GET /reset_data", "wandb_group",
        "wandb_project", "batch_size", "max_token_len", "checkpoint_dir",
        "save_checkpoint_interval", "starting_step", "num_steps"], "")),
    ("Data schema", dict.fromkeys([
        "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages",
        "generation_params", "inference_logprobs", "overrides", "group_overrides", "images",
        "env_id", "distill_token_ids", "distill_logprobs"], "")),
]


class Line(NamedTuple):
    """A row of a table, with the heading that it stands under."""

    section: str
    original: str
    their_default: str
    ours: str
    our_default: str
    note: str


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def read_tables(text: str) -> list[Line]:
    found, section = [], ""
    for line in text.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("|") and not line.startswith(("| original", "|---")):
            cells = [c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert len(cells) == 5, line
            found.append(Line(section, *cells))
    return found


TEXT = DOCUMENT.read_text()
LINES = read_tables(TEXT)


# -- our side, asked of the code ------------------------------------------------------------------


@cache
def settings(pipeline: str) -> dict[str, Any]:
    """The value of every flag of `rollstream PIPELINE` where nothing is given."""
    resolved = load_run_settings(pipeline, {}, {}, {})
    plain = msgspec.to_builtins(msgspec.structs.replace(resolved, run=RunSettings().run))
    return {s.flag: _leaf(plain, s.path) for s in settings_of(RunSettings)}


def _leaf(plain: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        plain = plain[part]
    return plain


@cache
def defaults(token: str) -> dict[str, Any] | None:
    """Default per pipeline of the setting that the token names; None where it names none."""
    if token in settings("rl"):
        return {pipeline: settings(pipeline)[token] for pipeline in PIPELINES}
    if (found := re.fullmatch(r"rollstream run ([\w-]+) (--[\w.-]+)", token)) is not None:
        values = {s.flag: s.default for s in settings_of(ServiceSettings)}
        if found[1] in routes.SIGNATURES and found[2] in values:
            return dict.fromkeys(PIPELINES, values[found[2]])
    for prefix, struct in (("endpoints.NAME.", Endpoint), ("environments[].", EnvironmentSource)):
        fields = {prefix + f.name: f.default for f in msgspec.structs.fields(struct)}
        if token in fields:
            return dict.fromkeys(PIPELINES, fields[token])
    return None


def exists(token: str, section: str) -> bool:
    """Whether the code has what the token names."""
    match token.split():
        case ["rollstream", "runs", action]:
            return action in {"list", "show", "rm", *ACTIONS}
        case ["rollstream", "run", service, flag]:
            return service in routes.SIGNATURES and flag in flags_of("service")
        case ["rollstream", "up", flag]:
            return flag in flags_of("up")
        case ["rollstream", command]:
            return command in COMMANDS
        case ["python", "-m", "rollstream.services.engine", flag]:
            return flag in flags_of("engine")
        case [method, path] if method in ("GET", "POST"):
            return (method, path) in endpoints()
    if token.startswith("--"):
        return token in flags_of("run")
    if token.startswith("["):
        return token.strip("[]").partition(".")[0] in file_keys()
    if token.startswith("ROLLSTREAM_"):
        return token in {s.variable for s in settings_of(RunSettings)}
    return defaults(token) is not None or token == BROKERS_VARIABLE or token in names(section)


@cache
def flags_of(what: str) -> set[str]:
    """Every flag that a command's parser takes."""
    if what in ("run", "service"):
        parsers: list[argparse.ArgumentParser] = []

        def keep(parser: argparse.ArgumentParser, _: object) -> dict[str, Any]:
            parsers.append(parser)
            raise ConfigError("test", "", "")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(start, "parse_flags", keep)
            patch.setattr(config, "parse_flags", keep)
            start.main("rl", []) if what == "run" else serve.main("generator", [])
        return set(parsers[0]._option_string_actions)
    parser = argparse.ArgumentParser() if what == "up" else engine.parser()
    if what == "up":
        up.add_flags(parser)
    return set(parser._option_string_actions)


@cache
def endpoints() -> set[tuple[str, str]]:
    api = TrainerApi(cast(TrainerLeaf, SimpleNamespace(run=run())))
    return {(r.method, r.resource.canonical) for r in api.app().router.routes() if r.resource}


@cache
def names(section: str) -> set[str]:
    """The bare names that mean something in a section: fields and files of ours."""
    group = Distilled(
        run="r", pipeline="eval", n=0, k=1, env=EnvRef("ENV"), row=Row(prompt=[]),
        samples=[Sample(i=0, stop=Stop.STOP)],
    )
    known: dict[str, Callable[[], set[str]]] = {
        "Data schema": lambda: set(scored_data_group(group)),
        "Trainer HTTP API": lambda: set(Registration.__struct_fields__),
        "Teacher": lambda: {*Group.__struct_fields__, *Distilled.__struct_fields__},
        "Data files": files,
        "Evaluation files": lambda: files() | report_names(group),
        "Weights & Biases metrics": lambda: report_names(group) | parquet_columns(),
    }
    return known.get(section, set)()


def report_names(group: Distilled) -> set[str]:
    line = FullLine(n=0, outcome=Outcome.DELIVERED, group=group)
    tallies = Tallies()
    tallies.add(line)
    return {key for sample in sample_lines(line, 0.5) for key in sample} | _keys(
        metrics_file(tallies, run("eval"), 0.0)
    )


def _keys(value: Any) -> set[str]:
    if not isinstance(value, dict):
        return set()
    return {*value} | {key for inner in value.values() for key in _keys(inner)}


def parquet_columns() -> set[str]:
    return _written()[1]


def files() -> set[str]:
    return _written()[0]


@cache
def _written() -> tuple[set[str], set[str]]:
    """The files that sinks and start command write for a run, and the columns of the parquet."""
    from pyarrow import parquet

    with TemporaryDirectory() as folder:
        out = Path(folder)
        finished = run(sink=SinkSettings(out=folder))
        write_dataset([], out, finished)
        write_report([], out, finished)
        propose.remember(finished)
        columns = parquet.read_schema(out / "dataset.parquet").names
        return {path.name for path in out.iterdir()}, set(columns)


# -- the tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "name", "default"),
    [(s, name, default) for s, table in ORIGINALS for name, default in table.items()],
)
def test_every_name_of_the_originals_has_its_row_and_its_default(section, name, default):
    rows = [line for line in LINES if line.section == section and name in quoted(line.original)]
    assert len(rows) == 1, f"{name}: {len(rows)} rows under {section}"
    assert not default or default in quoted(rows[0].their_default), (name, default)


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.section}: {line.original}")
def test_what_is_named_as_ours_exists_with_the_stated_default(line):
    tokens = quoted(line.ours)
    if line.ours == NONE or line.ours.startswith(NOT_YET):
        assert line.note, "say why not, or what to use meanwhile"
        assert line.our_default == NONE
        arrived = [token for token in tokens if exists(token, line.section)]
        assert not arrived, f"{arrived} exists now: the row says not yet"
        return
    assert tokens, "name what is ours in backticks"
    missing = [token for token in tokens if not exists(token, line.section)]
    assert not missing, f"the code has no {missing}"
    wanted = [(token, found) for token in tokens if (found := defaults(token)) is not None]
    parts = [] if line.our_default == NONE else line.our_default.split(" / ")
    assert len(parts) == len(wanted), f"a default for each of {[token for token, _ in wanted]}"
    for part, (token, found) in zip(parts, wanted, strict=True):
        if part == "required":
            assert is_required(token), token
        else:
            assert stated(part) == found, token


def stated(cell: str) -> dict[str, Any]:
    """`8`, eval `1`: the default of each pipeline."""
    first, *others = cell.split(", ") if "`, " in cell else [cell]
    values: dict[str, Any] = dict.fromkeys(PIPELINES, literal(first))
    for other in others:
        pipeline, _, value = other.partition(" ")
        assert pipeline in PIPELINES, cell
        values[pipeline] = literal(value)
    return values


def literal(text: str) -> Any:
    assert re.fullmatch(r"`[^`]+`", text), f"{text}: write one literal in backticks"
    return None if text == "`none`" else json.loads(text.strip("`"))


def is_required(token: str) -> bool:
    """Whether a run, or an endpoint, is refused for the lack of it."""
    if token.startswith("endpoints.NAME."):
        return (defaults(token) or {})["rl"] is msgspec.NODEFAULT
    enough = {"env": "e", "model": "m"}
    del enough[token.removeprefix("--")]
    with pytest.raises(ConfigError, match=f"^{token} = "):
        to_config("rl", load_run_settings("rl", {}, enough, {}), routes.load())
    return True


def test_flags_in_notes_and_text_exist():
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.S)
    named = {f for token in quoted(prose) for f in re.findall(r"(?<!\S)--[a-z][\w.-]*", token)}
    theirs = {f for f in named if f.startswith(("--env.", "--openai."))} | {"--slurm", "--testing"}
    ours = set().union(*map(flags_of, ("run", "service", "up", "engine")))
    planned = {t for line in LINES if line.ours.startswith(NOT_YET) for t in quoted(line.ours)}
    assert named - theirs - planned <= ours


# -- the commands ---------------------------------------------------------------------------------


def after_commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n# after\n(.*?)```", TEXT, re.S)
    return [shlex.split(c) for b in blocks for c in b.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("words", after_commands(), ids=" ".join)
def test_the_commands_of_after_are_accepted(words):
    _, command, *argv = words
    parser = argparse.ArgumentParser(allow_abbrev=False)
    if command == "up":
        up.add_flags(parser)
        parser.parse_args(argv)
        return
    config.add_flags(parser, RunSettings)
    given = load_run_settings(command, {}, config.parse_flags(parser, argv), {})
    assert to_config(command, given, routes.load()).pipeline == command


def test_there_is_one_command_for_each_mode():
    commands = [words[1] for words in after_commands()]
    assert [command for command in commands if command != "up"] == list(PIPELINES)


def test_the_files_of_the_document_are_accepted(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    first, second = [tomllib.loads(b) for b in re.findall(r"```toml\n(.*?)```", TEXT, re.S)]
    assert load_settings(first, {}).endpoint("openai").api_key() == "k"
    stages = routes.stages(routes.load(second["route"]), "rl", teacher=False)
    assert routes.leaves(stages) == ["trainer", "archive"]
