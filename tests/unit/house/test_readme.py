"""What the README tells people to type must be what the programs take."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from rd2h import cli
from rd2h.config import ConnectorConfig

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def connector_configs() -> list[dict[str, object]]:
    """The extra configurations of our connector in the README's --kv-transfer-config blocks."""
    found = []
    for block in re.findall(r"--kv-transfer-config '(\{.*?\n\})'", README, re.DOTALL):
        config = json.loads(block)
        for member in config["kv_connector_extra_config"].get("connectors", [config]):
            if member["kv_connector"] == "SfaRemoteD2HConnector":
                found.append(member["kv_connector_extra_config"])
    return found


def test_connector_configurations_are_accepted() -> None:
    configs = connector_configs()
    assert len(configs) == 2
    for extra in configs:
        assert ConnectorConfig.parse(extra, {}).transfer_backend == "memfabric"


def test_tabled_settings_exist() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+)(?: \(required\))? \|", README, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {"transfer_backend", "meta_service", "advertise_host"} <= names
    assert names <= set(ConnectorConfig.__dataclass_fields__)


@pytest.mark.parametrize("name", ["meta", "proxy"])
def test_commands_parse(name: str) -> None:
    lines = re.findall(rf"^rd2h {name}(?: .*\\\n)*.*$", README, re.MULTILINE)
    assert lines
    command = cli.find_command(name)
    assert command is not None
    component = cli.load(command)
    assert not isinstance(component, str)
    for line in lines:
        parser = argparse.ArgumentParser(exit_on_error=False)
        component.add_arguments(parser)
        parser.parse_args(shlex.split(line.replace("\\\n", " "))[2:])


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
