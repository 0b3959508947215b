"""The deployment files say only what the code understands; nothing here needs Docker or a cluster.

Every command of the compose file and of the manifests is parsed by the command line itself, every
variable is one that somebody reads, and the manifests fit the Kubernetes API's own schemas.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate
import making
import pytest
import yaml

from rollstream.services.cli.__main__ import main
from rollstream.services.cli.run_settings import RunSettings, load_run_settings
from rollstream.services.engine import options as engine
from rollstream.shared.attendance import CLEAN_UP_S
from rollstream.shared.config import settings_of
from rollstream.shared.service import RunContext
from rollstream.shared.settings import BROKERS_VARIABLE, ServiceSettings, load_settings

ROOT = Path(__file__).resolve().parents[2]
SERVICES = {"prompt-producer", "generator", "scorer", "teacher-distiller", "sink"}
CONFIG = "/etc/rollstream/rollstream.toml"
SUPPORTED = "1.30"
"""The oldest Kubernetes that the manifests are checked against; the newest is the package's."""

ENDING_S = CLEAN_UP_S + 10 + 15 + 10
"""What a service may take after its drain: attendance, what it cancels, its tasks, its service."""

VARIABLES = {BROKERS_VARIABLE} | {
    setting.variable for struct in (ServiceSettings, RunSettings) for setting in settings_of(struct)
}
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


class Launch(NamedTuple):
    """One container as it is started."""

    name: str
    argv: list[str]
    variables: dict[str, str]
    config: Path


def check_launch(launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> dict[str, Any]:
    """Start it with `--print-config`: the settings that it would run with."""
    service = launch.argv[1]
    assert launch.argv[:2] == ["run", service]
    assert launch.argv[launch.argv.index("--config") + 1] == CONFIG
    named = set(re.findall(r'api_key_env = "(\w+)"', launch.config.read_text()))
    assert set(launch.variables) <= VARIABLES | named
    for name, value in launch.variables.items():
        monkeypatch.setenv(name, value)
    argv = [str(launch.config) if word == CONFIG else word for word in launch.argv]
    code = main([*argv, "--print-config"])
    said = capsys.readouterr()
    assert code == 0, said.err
    lines = (line.partition(" = ") for line in said.out.splitlines())
    return {name: json.loads(value) for name, _, value in lines}


# -- the image ------------------------------------------------------------------------------------

def test_the_image_is_built_from_what_the_context_holds():
    """A folder that the Dockerfile copies must pass .dockerignore, and exist."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {
        word for line in lines if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert {"shared", "services", "environments"} <= copied


def test_the_image_runs_as_nobody_special_and_installs_pinned_versions():
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER 1000:1000$", text, re.M)
    assert re.search(r'^ENTRYPOINT \["rollstream"\]$', text, re.M)
    for extras in re.findall(r"EXTRAS=([\w,]+)", text):
        assert set(extras.split(",")) <= set(_extras())
    for line in re.findall(r"pip install (.*)", text):
        assert "-c constraints/" in line or "--no-deps" in line


def _extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"]


# -- docker compose -------------------------------------------------------------------------------

@pytest.mark.parametrize("name", sorted(SERVICES))
def test_compose_starts_each_service_with_settings_that_exist(name, monkeypatch, capsys):
    container = COMPOSE["services"][name]
    settings = check_launch(
        Launch(name, container["command"], container["environment"],
               ROOT / "docker" / "rollstream.toml"),
        monkeypatch, capsys,
    )
    assert container["command"][1] == name
    assert settings["brokers"] == "kafka:9092"
    assert settings["health_host"] == "0.0.0.0"
    assert f"127.0.0.1:{settings['health_port']}/readyz" in container["healthcheck"]["test"][-1]
    compile(container["healthcheck"]["test"][-1], "healthcheck", "exec")
    assert container["depends_on"]["kafka"] == {"condition": "service_healthy"}
    assert f"./docker/rollstream.toml:{CONFIG}:ro" in container["volumes"]
    grace_s = float(container["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings["drain_s"] + ENDING_S


def test_compose_starts_the_engine_where_the_services_look_for_it():
    container = COMPOSE["services"]["engine"]
    assert container["entrypoint"] == ["python", "-m", "rollstream.services.engine"]
    given = engine.parse(container["command"])
    table = tomllib.loads((ROOT / "docker" / "rollstream.toml").read_text())
    assert table["endpoints"]["default"]["url"] == f"http://engine:{given.port}/v1"
    assert table["run"]["model"] == given.served_model_name
    assert f"127.0.0.1:{given.port}/health" in container["healthcheck"]["test"][-1]


def test_compose_publishes_ports_on_this_machine_alone_and_the_trainers_among_them():
    ports = {
        name: container["ports"]
        for name, container in COMPOSE["services"].items() if "ports" in container
    }
    assert all(port.startswith("127.0.0.1:") for found in ports.values() for port in found)
    table = tomllib.loads((ROOT / "docker" / "rollstream.toml").read_text())
    run = load_run_settings("rl", table, {}, {})
    assert ports["sink"] == [f"127.0.0.1:{run.sink.port}:{run.sink.port}"]
    assert run.sink.host == "0.0.0.0"
    assert run.startup_wait_s >= table["startup_wait_s"], "it would not hear their reasons"


def test_compose_pins_images_and_builds_ours_from_extras_that_exist():
    for name, container in COMPOSE["services"].items():
        tag = container["image"].rpartition(":")[2]
        assert re.fullmatch(r"\d+\.\d+\.\d+", tag), name
        if "build" in container:
            assert set(container["build"]["args"]["EXTRAS"].split(",")) <= set(_extras())
            assert tag == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_compose_names_only_volumes_and_services_that_exist():
    for container in COMPOSE["services"].values():
        assert set(container.get("depends_on", {})) <= set(COMPOSE["services"])
        for volume in container.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or source == "./runs" or (ROOT / source).is_file()


# -- Kubernetes -----------------------------------------------------------------------------------

OVERLAYS = ["base", "overlays/dev", "overlays/prod"]


def files() -> list[Path]:
    return sorted((ROOT / "k8s").rglob("*.yaml"))


def objects_in(text: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(text) if found]


def test_every_manifest_is_used_and_every_name_in_a_kustomization_is_a_file():
    used = set()
    for path in (ROOT / "k8s").rglob("kustomization.yaml"):
        (found,) = objects_in(path.read_text())
        names = [*found.get("resources", []), *found.get("components", [])]
        names += [patch["path"] for patch in found.get("patches", []) if "path" in patch]
        names += [f for g in found.get("configMapGenerator", []) for f in g.get("files", [])]
        for name in names:
            target = (path.parent / name).resolve()
            assert target.exists(), f"{path}: {name}"
            used.add(target)
    assert {path for path in files() if path.name != "kustomization.yaml"} <= used


def test_raw_manifests_start_the_services_by_commands_that_exist(monkeypatch, capsys):
    """Without kustomize, too: the arguments are in the Deployments, not in a patch."""
    started = set()
    for path in sorted((ROOT / "k8s" / "base").glob("*.yaml")):
        for found in objects_in(path.read_text()):
            pod = found.get("spec", {}).get("template", {}).get("spec", {})
            for container in pod.get("containers", []):
                if "args" in container:
                    config = ROOT / "k8s" / "base" / "rollstream.toml"
                    check_launch(
                        Launch(found["metadata"]["name"], container["args"], {}, config),
                        monkeypatch, capsys,
                    )
                    assert container["args"][1] == found["metadata"]["name"]
                    started.add(found["metadata"]["name"])
    assert started == SERVICES


@pytest.fixture(scope="session")
def kustomize(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Renders a folder of k8s/, or one of the test's own."""
    if shutil.which("kustomize"):
        command = ["kustomize", "build"]
    elif shutil.which("kubectl"):
        command = ["kubectl", "kustomize"]
    else:
        pytest.skip("neither kustomize nor kubectl is here")
    copy = tmp_path_factory.mktemp("kustomize") / "k8s"
    shutil.copytree(ROOT / "k8s", copy)
    (copy / "overlays" / "scaled").mkdir()
    documented = re.search(
        r"```yaml\n(.*?scale-by-backlog.*?)```", (ROOT / "docs" / "deploying.md").read_text(), re.S
    )
    assert documented
    (copy / "overlays" / "scaled" / "kustomization.yaml").write_text(documented[1])

    @functools.cache
    def render(folder: str) -> list[dict[str, Any]]:
        result = subprocess.run(
            [*command, str(copy / folder)], capture_output=True, text=True, timeout=60, check=False
        )
        if "unknown field" in result.stderr or "unknown command" in result.stderr:
            pytest.skip(f"{command[0]} is too old: {result.stderr.strip()[:80]}")
        assert result.returncode == 0, result.stderr
        return objects_in(result.stdout)

    return render


def of_kind(rendered: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {o["metadata"]["name"]: o for o in rendered if o["kind"] == kind}


@pytest.mark.parametrize("version", [SUPPORTED, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("overlay", [*OVERLAYS, "overlays/scaled"])
def test_rendered_manifests_fit_the_api_schemas(kustomize, overlay, version):
    checked = 0
    for found in kustomize(overlay):
        if found["apiVersion"].startswith("keda.sh/"):
            continue
        kubernetes_validate.validate(found, version, strict=True)
        checked += 1
    assert checked > len(SERVICES)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rendered_services_start_with_settings_that_exist(
    kustomize, overlay, tmp_path, monkeypatch, capsys
):
    rendered = kustomize(overlay)
    maps = of_kind(rendered, "ConfigMap")
    deployments = of_kind(rendered, "Deployment")
    assert set(deployments) >= SERVICES
    for name in sorted(SERVICES):
        spec = deployments[name]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        mounted = {volume["name"]: volume for volume in spec["volumes"]}
        assert {m["name"] for m in container["volumeMounts"]} == set(mounted)
        config = tmp_path / f"{name}.toml"
        config.write_text(maps[mounted["config"]["configMap"]["name"]]["data"]["rollstream.toml"])
        variables = {}
        for variable in container["env"]:
            source = variable.get("valueFrom", {}).get("configMapKeyRef")
            variables[variable["name"]] = (
                maps[source["name"]]["data"][source["key"]] if source
                else variable.get("value", "from-a-secret")
            )
        settings = check_launch(
            Launch(name, container["args"], variables, config), monkeypatch, capsys
        )
        assert settings["brokers"]
        assert settings["startup_wait_s"] == 900
        check_probes(container, settings)
        assert spec["terminationGracePeriodSeconds"] > settings["drain_s"] + ENDING_S
        table = tomllib.loads(config.read_text())
        run = load_run_settings("rl", table, {}, variables)
        assert run.sink.host == "0.0.0.0"
        assert run.startup_wait_s >= settings["startup_wait_s"], "it would not hear their reasons"


def check_probes(container: dict[str, Any], settings: dict[str, Any]) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["health"] == settings["health_port"]
    assert settings["health_host"] == "0.0.0.0"
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"health"}
    assert probes["liveness"]["httpGet"]["path"] == "/livez"
    assert probes["readiness"]["httpGet"]["path"] == "/readyz"
    patience_s = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    assert patience_s > settings["startup_wait_s"], "the service itself must give up first"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_run_restricted_and_no_service_sets_one_of_our_variables(kustomize, overlay):
    for name, deployment in of_kind(kustomize(overlay), "Deployment").items():
        spec = deployment["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["enableServiceLinks"] is False, name
        assert spec["automountServiceAccountToken"] is False, name
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert re.fullmatch(r"rollstream(-engine)?:\d+\.\d+\.\d+", container["image"])
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_meet_their_pods(kustomize, overlay):
    rendered = kustomize(overlay)
    pods = {
        name: deployment["spec"]["template"]["metadata"]["labels"]
        for name, deployment in of_kind(rendered, "Deployment").items()
    }

    def selected(labels: dict[str, str]) -> set[str]:
        return {name for name, has in pods.items() if labels.items() <= has.items()}

    assert selected(of_kind(rendered, "Service")["trainer-api"]["spec"]["selector"]) == {"sink"}
    for name, budget in of_kind(rendered, "PodDisruptionBudget").items():
        assert selected(budget["spec"]["selector"]["matchLabels"]) == {name}
    policy = of_kind(rendered, "NetworkPolicy")["rollstream"]["spec"]["podSelector"]
    assert selected(policy["matchLabels"]) == SERVICES
    assert of_kind(rendered, "Deployment")["prompt-producer"]["spec"]["replicas"] == (
        1 if overlay.endswith("dev") else 2
    )


def test_dev_runs_the_engine_where_its_services_look_for_it(kustomize):
    rendered = kustomize("overlays/dev")
    engine_pod = of_kind(rendered, "Deployment")["engine"]["spec"]["template"]["spec"]
    (container,) = engine_pod["containers"]
    assert container["command"] == ["python", "-m", "rollstream.services.engine"]
    given = engine.parse(container["args"])
    (config,) = (
        m["data"]["rollstream.toml"] for name, m in of_kind(rendered, "ConfigMap").items()
        if name.startswith("rollstream")
    )
    table = tomllib.loads(config)
    assert load_settings({"endpoints": table["endpoints"]}, {}).endpoint("default").url == (
        f"http://engine:{given.port}/v1"
    )
    assert of_kind(rendered, "Service")["engine"]["spec"]["ports"][0]["port"] == given.port
    assert table["run"]["model"] == given.served_model_name


def test_scaling_reads_the_topic_and_the_group_that_a_generator_uses(kustomize):
    """The names of `shared/topics.py` and `RunContext.group`, for the documented overlay's run."""
    rendered = kustomize("overlays/scaled")
    config = making.run("rl", run="my-run")
    context = RunContext(config, config.stage("generator"), bus=None)  # type: ignore[arg-type]
    (trigger,) = of_kind(rendered, "ScaledObject")["generator"]["spec"]["triggers"]
    assert trigger["metadata"]["topic"] == context.topic("prompts")
    assert trigger["metadata"]["consumerGroup"] == context.group
    assert int(trigger["metadata"]["lagThreshold"]) == ServiceSettings().max_in_flight
    generator = of_kind(rendered, "Deployment")["generator"]["spec"]
    assert "replicas" not in generator
    assert trigger["metadata"]["bootstrapServersFromEnv"] in {
        variable["name"] for variable in generator["template"]["spec"]["containers"][0]["env"]
    }
