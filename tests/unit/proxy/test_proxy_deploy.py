"""Deployment files speak of flags and paths that exist."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from rd2h_proxy import config

DEPLOY = Path(__file__).resolve().parents[3] / "clients" / "deploy"


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
    assert spec["selector"]["matchLabels"] == labels
    assert by_kind["Service"]["spec"]["selector"] == labels
    assert by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    args = parser().parse_args(container["args"])
    assert args.discover
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert args.meta_token_file.startswith(mounts["meta"])
    assert args.meta_ca.startswith(mounts["ca"])
    assert {port["name"] for port in container["ports"]} >= {container["readinessProbe"]["httpGet"]["port"]}


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
