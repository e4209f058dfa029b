"""The files in server/deploy: valid, and true to the service they start."""

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from meta_harness import MetaProcess, engine
from rd2h_client import MetaClient
from rd2h_meta.config import ENVIRONMENT_PREFIX, MetaConfig

DEPLOY = Path(__file__).resolve().parents[3] / "server" / "deploy"
MANIFESTS = sorted(path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.name != "kustomization.yaml")
SETTINGS = {field.name for field in fields(MetaConfig)}
KUBERNETES = "1.33"


def documents(path: Path) -> list[dict]:  # type: ignore[type-arg]
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_the_schema(path: Path) -> None:
    (document,) = documents(path)
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_validator_can_fail() -> None:
    (document,) = documents(DEPLOY / "kubernetes" / "deployment.yaml")
    document["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_kustomization_names_what_there_is() -> None:
    kustomization = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    named = set(kustomization["resources"]) | {"tls-secret.yaml"}
    assert named == {path.name for path in MANIFESTS}


def test_manifests_agree_with_each_other_and_with_the_service() -> None:
    loaded = {path.stem: documents(path)[0] for path in MANIFESTS}
    pod = loaded["deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"]
    for selector in (
        loaded["service"]["spec"]["selector"],
        loaded["deployment"]["spec"]["selector"]["matchLabels"],
        loaded["pod-disruption-budget"]["spec"]["selector"]["matchLabels"],
        loaded["network-policy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    for name in environment:
        assert name.removeprefix(ENVIRONMENT_PREFIX).lower() in SETTINGS
    for setting, port in (("LISTEN", "grpc"), ("PROBE_LISTEN", "probe"), ("METRICS_LISTEN", "metrics")):
        assert environment[f"{ENVIRONMENT_PREFIX}{setting}"].endswith(f":{ports[port]}")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["grpc"]["port"] == ports["probe"]
    for port in loaded["service"]["spec"]["ports"]:
        assert port["targetPort"] in ports
    assert pod["spec"]["terminationGracePeriodSeconds"] > float(environment[f"{ENVIRONMENT_PREFIX}GRACE_S"])
    (secret,) = [volume["secret"]["secretName"] for volume in pod["spec"]["volumes"]]
    assert secret == loaded["tls-secret"]["metadata"]["name"]
    keys = {Path(environment[f"{ENVIRONMENT_PREFIX}{name}"]).name for name in ("TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA")}
    assert keys == set(loaded["tls-secret"]["stringData"])
    config = {name.removeprefix(ENVIRONMENT_PREFIX).lower(): value for name, value in environment.items()}
    assert not config.get("insecure_listen")


def test_the_containerfile_sets_known_settings_and_runs_as_nobody() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for name in re.findall(rf"{ENVIRONMENT_PREFIX}([A-Z_]+)=", text):
        assert name.lower() in SETTINGS
    user = re.search(r"^USER (\d+)", text, re.MULTILINE)
    assert user
    assert int(user[1]) >= 1000
    assert text.index("USER ") < text.index("ENTRYPOINT")
    assert 'ENTRYPOINT ["rd2h", "meta", "serve"]' in text
    root = DEPLOY.parents[1]
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for source in shlex.split(line)[:-1]:
            assert (root / source).exists(), source


def test_the_unit_and_the_example_settings() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "rd2h-meta.service")
    command = shlex.split(unit["Service"]["ExecStart"])
    assert command[1:3] == ["meta", "serve"]
    settings = tomllib.loads((DEPLOY / "meta.toml").read_text())
    assert set(settings) <= SETTINGS
    assert float(unit["Service"]["TimeoutStopSec"]) > settings["grace_s"]
    done = subprocess.run(
        [sys.executable, "-m", "rd2h_meta.cli", "serve", "--config", str(DEPLOY / "meta.toml")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    # Everything but the certificate files is right.
    assert re.match(r"rd2h meta: tls_\w+: got '/etc/rd2h/tls/[a-z.]+', which cannot be read", done.stderr)


async def test_the_dashboard_asks_for_metrics_that_exist(make_service: Callable[..., MetaProcess]) -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    asked = set()
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            asked |= set(re.findall(r"rd2h_meta_\w+", target["expr"]))
    service = make_service("--metrics-listen", "127.0.0.1:0")
    url = service.next_line("rd2h meta: metrics on ")
    body = subprocess.run(
        [sys.executable, "-c", "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())", url],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    offered = {line.split()[2] for line in body.splitlines() if line.startswith("# TYPE ")}
    assert asked <= offered
    assert offered - asked <= {"rd2h_meta_registry_revision"}


def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rd2h.cli", "meta", "probe", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env=dict(os.environ),
        check=False,
    )


async def test_probe(shared_service: MetaProcess) -> None:
    for service in ("", "liveness", "rd2h.meta.v1.Rendezvous"):
        done = probe(shared_service.target, "--service", service)
        assert (done.returncode, done.stdout) == (0, "SERVING\n")
    async with MetaClient(shared_service.target) as client:
        await client.register(engine("d-probe", state=1))
        done = probe(shared_service.address, "--service", "rd2h.engine.d-probe")
        assert (done.returncode, done.stdout) == (1, "NOT_SERVING\n")
    done = probe("127.0.0.1:1", "--deadline-s", "0.5")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert probe("http://x").returncode == 2
