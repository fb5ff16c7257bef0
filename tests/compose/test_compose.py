"""compose/: against the specification, hardened, and every command line run as a plain process."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.checkpoint import bundled
from outrider.client import Client
from tests.processes import Program, free_port, installed, running, until

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
SERVICES = ("drafter", "verifier", "gateway", "prometheus", "grafana")
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def interpolated(text: str, given: dict[str, str]) -> str:
    """Compose's own ${NAME}, ${NAME:-default} and ${NAME:?complaint}."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        if given.get(name):
            return given[name]
        assert kind == "-", f"{name}: {rest or 'not set'}"
        return rest

    return VARIABLE.sub(value, text)


def example() -> dict[str, str]:
    """Settings of .env.example."""
    lines = (COMPOSE / ".env.example").read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return dict(pairs)


def model(**given: str) -> dict[str, Any]:
    """The compose file as an engine would read it."""
    text = (COMPOSE / "compose.yaml").read_text()
    settings = example() | {"GRAFANA_PASSWORD": "secret"} | given
    return yaml.safe_load(interpolated(text, settings))


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return model()["services"]


def of_profile(services: dict[str, Any], profile: str) -> dict[str, Any]:
    return {name: each for name, each in services.items() if profile in each["profiles"]}


# --- the file


def test_it_is_what_the_compose_specification_allows(tmp_path):
    checker = installed("check-jsonschema")
    if checker is None:
        pytest.skip("needs check-jsonschema: pip install check-jsonschema")
    command = [checker, "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, COMPOSE / "compose.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = tmp_path / "compose.yaml"
    broken.write_text(
        (COMPOSE / "compose.yaml").read_text().replace("cap_drop: [ALL]", "cap_drop: ALL")
    )
    assert subprocess.run([*command, broken], capture_output=True).returncode != 0


def test_each_profile_has_all_five(services):
    cpu = {name.removesuffix("-cpu") for name in of_profile(services, "cpu")}
    assert set(of_profile(services, "gpu")) == cpu == set(SERVICES)


def test_nothing_has_more_rights_than_it_needs(services):
    for name, each in services.items():
        assert each["read_only"] is True, name
        assert each["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in each["security_opt"], name
        for grant in ("privileged", "cap_add", "network_mode", "pid", "ipc", "user", "devices"):
            assert grant not in each, (name, grant)
        assert not any("docker.sock" in volume for volume in each.get("volumes", ())), name


def test_only_loopback_is_published_unless_asked(services):
    for name, each in services.items():
        for port in each.get("ports", ()):
            assert port.startswith("127.0.0.1:"), (name, port)
    assert all("ports" not in services[name] for name in ("drafter", "drafter-cpu"))


def test_one_starts_when_what_it_needs_is_healthy(services):
    for name, each in services.items():
        assert each["healthcheck"]["test"][0] == "CMD", name
        for other, condition in each.get("depends_on", {}).items():
            assert condition["condition"] == "service_healthy", (name, other)
    needs = {name: set(each.get("depends_on", ())) for name, each in services.items()}
    assert needs["verifier"] == {"drafter"} and needs["verifier-cpu"] == {"drafter-cpu"}
    # one of the two is not in the chosen profile
    assert needs["gateway"] == {"verifier", "verifier-cpu"}
    assert not any(c["required"] for c in services["gateway"]["depends_on"].values())


def test_gpus_are_reserved_by_the_gpu_profile_alone(services):
    for name in ("drafter", "verifier"):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    for name, each in of_profile(services, "cpu").items():
        assert "deploy" not in each, name


def test_weights_are_a_named_volume_that_nobody_writes():
    found = model()
    volumes = found["volumes"]
    for name in ("drafter", "verifier"):
        assert "weights:/weights:ro" in found["services"][name]["volumes"]
        for each in (name, f"{name}-cpu"):
            assert "shared-memory:/dev/shm" in found["services"][each]["volumes"]
    for each in found["services"].values():
        for volume in each.get("volumes", ()):
            source, _, rest = volume.partition(":")
            assert source in volumes or (source.startswith("./") and rest.endswith(":ro")), volume
            if source.startswith("./"):
                assert (COMPOSE / source).is_dir()


def test_stopping_takes_as_long_as_draining(services):
    for name in ("verifier", "verifier-cpu"):
        (drain,) = (c for c in services[name]["command"] if c.startswith("--drain-timeout="))
        assert int(services[name]["stop_grace_period"].rstrip("s")) > int(drain.split("=")[1])


def test_the_example_names_every_variable_with_the_default_of_the_file():
    text = (COMPOSE / "compose.yaml").read_text()
    found = {name: rest for name, kind, rest in VARIABLE.findall(text) if kind == "-"}
    needed = {name for name, kind, _ in VARIABLE.findall(text) if kind == "?"}
    settings = example()
    # the profile is compose's own
    assert settings.keys() - {"COMPOSE_PROFILES"} == found.keys() | needed
    assert {name: settings[name] for name in found} == found
    assert all(settings[name] == "" for name in needed)


def test_a_password_is_asked_for():
    with pytest.raises(AssertionError, match="GRAFANA_PASSWORD"):
        model(GRAFANA_PASSWORD="")


# --- the images


def stages() -> dict[str, list[str]]:
    """Instructions of the Dockerfile by stage."""
    text = re.sub(r"\\\n\s*", " ", (COMPOSE / "Dockerfile").read_text())
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("FROM "):
            assert line.split()[1].endswith("-slim-bookworm") or line.split()[1] in found
            found[line.split()[-1]] = [line]
        elif line and not line.startswith("#") and found:
            found[list(found)[-1]].append(line)
    return found


def test_every_service_builds_a_stage_that_runs_as_nobody_special(services):
    found = stages()
    for name in ("drafter", "verifier", "gateway", "drafter-cpu", "verifier-cpu"):
        target = services[name]["build"]["target"]
        assert target == name.removesuffix("-cpu")
        lines = list(found[target])
        while (base := lines[0].split()[1]) in found:
            lines[:1] = found[base]
        assert "USER 10001:10001" in lines
        assert lines[-1].startswith("ENTRYPOINT")
    assert (services["drafter"]["build"].get("args"), services["drafter-cpu"]["build"]["args"]) == (
        None,
        {"EXTRA": "serve", "TORCH_INDEX": "https://download.pytorch.org/whl/cpu"},
    )


def test_what_is_copied_exists_and_is_let_in():
    ignore = (COMPOSE / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in ignore if line.startswith("!")]
    copied = [
        source
        for lines in stages().values()
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == each or source.startswith(f"{each}/") for each in allowed), source
    assert "*" in ignore


def test_what_is_copied_installs_with_all_that_a_service_imports(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for line in stages()["build"]:
        for name in line.split()[1:-1] if line.startswith("COPY ") else ():
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name)
            else:
                shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(site), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for package in ("outrider", "kernels", "drafter", "verifier"):
        base = ROOT / "protos" if package == "outrider" else ROOT
        for module in (base / package).rglob("*.py"):
            assert (site / module.relative_to(base)).exists(), module


# --- every command line, as plain processes


class Deployment:
    """The services of a profile on this host: each port of the file has one of this host's."""

    def __init__(self, stack: ExitStack, services: dict[str, Any], folder: Path) -> None:
        self._stack = stack
        self._services = services
        self._folder = folder
        self._ports: dict[str, int] = {}

    def port(self, number: int | str) -> int:
        """This host's port for one of the file's."""
        return self._ports.setdefault(str(number), free_port())

    def local(self, argument: str) -> str:
        """An argument with addresses of this host."""
        argument = argument.replace("0.0.0.0", "127.0.0.1")
        argument = re.sub(r"\b(drafter|verifier|gateway|prometheus):(?=\d)", "127.0.0.1:", argument)
        return re.sub(
            r"(?<=127\.0\.0\.1:)\d+|(?<=port=)\d+", lambda n: str(self.port(n[0])), argument
        )

    def start(self, name: str, *entrypoint: str) -> Program:
        """Runs a service's command, and returns when its health check says so."""
        service = self._services[name]
        command = [*entrypoint, *map(self.local, service["command"])]
        program = self._stack.enter_context(
            running(command, self._folder / f"{name}.log", environment={"PYTHONUNBUFFERED": "1"})
        )
        until(lambda: self.healthy(name), f"{name} healthy", program)
        return program

    def healthy(self, name: str) -> bool:
        """Runs a service's health check."""
        _, program, *arguments = self._services[name]["healthcheck"]["test"]
        found = installed(program)
        assert found is not None, program
        command = [found, *map(self.local, arguments)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def fetch(self, port: int, path: str) -> str:
        """A page of a service."""
        address = f"http://127.0.0.1:{self.port(port)}{path}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.read().decode()


def entrypoint(target: str) -> list[str]:
    """The entry point of an image, with programs of this environment."""
    line = stages()[target][-1]
    program, *rest = json.loads(line.removeprefix("ENTRYPOINT "))
    found = installed(program)
    if found is None:
        pytest.skip(f"needs {program}")
    return [found, *rest]


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Drafter, verifier and gateway of a profile; that for GPUs here over the bundled pair."""
    suffix = "-cpu" if request.param == "cpu" else ""
    given = {"TARGET": str(bundled("target")), "DRAFT": str(bundled("dflash2"))}
    services = model(**given, MAX_CONTEXT="2048")["services"]
    with ExitStack() as stack:
        found = Deployment(stack, services, tmp_path_factory.mktemp(request.param))
        for name in ("drafter", "verifier"):
            assert not found.healthy(f"{name}{suffix}")
            found.start(f"{name}{suffix}", *entrypoint(name))
        found.start("gateway", *entrypoint("gateway"))
        yield found


def test_a_profile_s_commands_serve_openai_clients(deployment):
    asked = {"model": "outrider", "prompt": "def main():", "max_tokens": 16, "temperature": 0}
    address = f"http://127.0.0.1:{deployment.port(30000)}/v1/completions"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(asked).encode(), headers)
    answers: list[Any] = []

    def answered() -> bool:
        # the gateway is ready before it has fetched the tokenizer
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answers.append(json.load(answer))
        except urllib.error.HTTPError:
            return False
        return True

    until(answered, "the gateway answers")
    with Client(f"127.0.0.1:{deployment.port(50051)}") as client:
        assert client.server_info().drafter_state == "connected"
        expected = client.generate("def main():", max_tokens=16, temperature=0)
    assert answers[0]["choices"][0]["text"] == expected.text
    details = answers[0]["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == expected.usage.accepted > 0


# --- what is watched


def expressions() -> list[str]:
    """Every PromQL expression of dashboard and rules."""
    rules = yaml.safe_load((COMPOSE / "prometheus/rules.yml").read_text())
    found = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    board = json.loads((COMPOSE / "grafana/dashboards/outrider.json").read_text())
    found += [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return found + [each["definition"] for each in board["templating"]["list"]]


def promtool(*arguments: object) -> str:
    program = installed("promtool")
    if program is None:
        pytest.skip("needs promtool: Debian's package prometheus has it")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_its_configuration_and_rules():
    assert "SUCCESS" in promtool("check", "config", COMPOSE / "prometheus/prometheus.yml")


def test_each_rule_fires_when_it_should_and_not_before():
    promtool("test", "rules", Path(__file__).parent / "rules_test.yaml")
    rules = yaml.safe_load((COMPOSE / "prometheus/rules.yml").read_text())
    names = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    cases = yaml.safe_load((Path(__file__).parent / "rules_test.yaml").read_text())
    tried = {
        c["alertname"]
        for test in cases["tests"]
        for c in test["alert_rule_test"]
        if c["exp_alerts"]
    }
    assert tried == names


def test_every_metric_of_dashboard_and_rules_exists(deployment):
    served = "".join(deployment.fetch(port, "/metrics") for port in (9464, 9465, 29000))
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", served, re.M))
    known = {"up"}
    for name, kind in kinds.items():
        parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        known |= {name + part for part in parts}
    text = "".join(expressions())
    named = set(re.findall(r"\b(?:outrider_\w+|smg_\w+|up\b)", text))
    assert len(named) > 30
    assert named <= known
    # and the labels that they choose by
    for metric, label in re.findall(r"(outrider_\w+)\{[^}]*?(\w+)(?:=|!=|=~|!~)\"", text):
        if label != "instance":
            assert re.search(rf"^{metric}\{{[^}}]*\b{label}=", served, re.M), (metric, label)


def test_the_dashboard_is_whole():
    board = json.loads((COMPOSE / "grafana/dashboards/outrider.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) > 20
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    source = yaml.safe_load(
        (COMPOSE / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"][0]
    assert {p["datasource"]["uid"] for p in board["panels"] if "datasource" in p} == {source["uid"]}


def test_prometheus_scrapes_all_three_by_the_names_of_the_file(services):
    config = yaml.safe_load((COMPOSE / "prometheus/prometheus.yml").read_text())
    targets = {
        job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]
    }
    assert targets == {
        "verifier": ["verifier:9464"],
        "drafter": ["drafter:9465"],
        "gateway": ["gateway:29000"],
    }
    for name, port in (("verifier", 9464), ("drafter", 9465)):
        for each in (name, f"{name}-cpu"):
            assert f"--metrics-listen=0.0.0.0:{port}" in services[each]["command"]
    assert "--prometheus-port=29000" in services["gateway"]["command"]


def test_prometheus_itself_runs_the_file_s_command_and_finds_its_targets(deployment, tmp_path):
    program = installed("prometheus")
    if program is None:
        pytest.skip("needs prometheus: Debian's package prometheus has it")
    folder = tmp_path / "prometheus"
    shutil.copytree(COMPOSE / "prometheus", folder)
    config = folder / "prometheus.yml"
    config.write_text(deployment.local(config.read_text()))
    own = model()["services"]["prometheus"]
    command = [
        argument.replace("/etc/prometheus", str(folder)).replace(
            "=/prometheus", f"={tmp_path}/data"
        )
        for argument in own["command"]
    ]
    command.append(f"--web.listen-address=127.0.0.1:{deployment.port(9090)}")
    with running([program, *command], tmp_path / "log") as server:

        def up() -> bool:
            try:
                page = deployment.fetch(9090, "/api/v1/query?query=up")
            except OSError:
                return False
            found = {r["metric"]["job"]: r["value"][1] for r in json.loads(page)["data"]["result"]}
            return found == {"verifier": "1", "drafter": "1", "gateway": "1"}

        until(up, "all targets are up", server)
        rules = json.loads(deployment.fetch(9090, "/api/v1/rules"))["data"]["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"} and len(rules) > 5
