"""Deployment files speak of flags and paths that exist."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from rd2h_client.addresses import parse_target
from rd2h_proxy import config

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "clients" / "deploy"
META = ROOT / "server" / "deploy" / "kubernetes"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False)
    config.add_arguments(made)
    return made


def test_kubernetes_objects_fit_together() -> None:
    objects: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    for entry in objects:
        kubernetes_validate.validate(entry, "1.31", strict=True)
    by_kind = {entry["kind"]: entry for entry in objects}
    assert set(by_kind) == {"Secret", "Deployment", "Service", "PodDisruptionBudget"}
    spec = by_kind["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert by_kind["Service"]["spec"]["selector"].items() <= labels.items()
    assert by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    args = parser().parse_args(container["args"])
    assert args.discover
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    files = {Path(path).name for path in (args.meta_ca, args.meta_cert, args.meta_key)}
    assert files == set(by_kind["Secret"]["stringData"])
    assert {str(Path(path).parent) for path in (args.meta_ca, args.meta_cert, args.meta_key)} == {mounts["tls"]}
    assert {volume["secret"]["secretName"] for volume in pod["volumes"]} == {by_kind["Secret"]["metadata"]["name"]}
    config.config_from(args)
    assert {port["name"] for port in container["ports"]} >= {container["readinessProbe"]["httpGet"]["port"]}


def test_the_proxy_is_let_in_by_the_meta_service_as_deployed() -> None:
    proxy = {entry["kind"]: entry for entry in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    pod = proxy["Deployment"]["spec"]["template"]
    args = parser().parse_args(pod["spec"]["containers"][0]["args"])
    service, deployment, policy = (
        yaml.safe_load((META / f"{name}.yaml").read_text()) for name in ("service", "deployment", "network-policy")
    )
    target = parse_target(args.meta_service)
    assert (target.host, target.secure) == (service["metadata"]["name"], True)
    assert target.port in {port["port"] for port in service["spec"]["ports"]}
    settings = {entry["name"] for entry in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert bool(args.meta_cert) == ("RD2H_META_TLS_CLIENT_CA" in settings)
    assert bool(args.meta_token_file) == ("RD2H_META_TOKEN_FILE" in settings)
    (allowed,) = policy["spec"]["ingress"][0]["from"]
    assert allowed["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_systemd_example_flags_are_accepted() -> None:
    text = (DEPLOY / "rd2h-proxy.service").read_text()
    (flags,) = re.findall(r"RD2H_PROXY_FLAGS=(.*)", text)
    (command,) = re.findall(r"ExecStart=\S+ proxy (.*)", text)
    settings = config.config_from(parser().parse_args(command.replace("$RD2H_PROXY_FLAGS", flags).split()))
    assert settings.prefill == ("10.0.0.1:8100",)


def test_containers_entry_point_is_accepted() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    command = json.loads(entry)
    assert parser().parse_args(command[2:]).port == 8000
