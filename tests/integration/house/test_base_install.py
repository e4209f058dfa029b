"""`pip install .` into a fresh environment: small, importable, without vLLM and torch, under both protobuf majors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INSTALL_TIMEOUT_S = 240

pytestmark = pytest.mark.timeout(2 * INSTALL_TIMEOUT_S)


def run(*command: str, cwd: Path) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module", params=["protobuf>=6.31.1,<7", "protobuf>=7,<8"], ids=["protobuf-6", "protobuf-7"])
def base_python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment that holds nothing but the base install."""
    folder = tmp_path_factory.mktemp("base")
    run(sys.executable, "-m", "venv", str(folder / "venv"), cwd=folder)
    python = str(folder / "venv" / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", str(ROOT), request.param, cwd=folder)
    return python


def test_brings_neither_torch_nor_vllm(base_python: str, tmp_path: Path) -> None:
    listed = json.loads(run(base_python, "-m", "pip", "list", "--format", "json", cwd=tmp_path))
    names = {package["name"].lower() for package in listed}
    assert "rd2h" in names
    assert not {name for name in names if name.startswith(("torch", "vllm", "nvidia"))}
    assert len(names) < 20, sorted(names)


def test_base_modules_import_without_warnings(base_python: str, tmp_path: Path) -> None:
    modules = (
        "rd2h_client, rd2h_client.v1.engine_registry_pb2_grpc, rd2h_client.v1.rendezvous_pb2_grpc, rd2h_meta, rd2h.wire"
    )
    run(base_python, "-W", "error", "-c", f"import {modules}", cwd=tmp_path)


def test_command_works_and_names_the_missing_extra(base_python: str, tmp_path: Path) -> None:
    command = str(Path(base_python).parent / "rd2h")
    assert "meta serve" in run(command, "--help", cwd=tmp_path)
    done = subprocess.run([command, "proxy"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "rd2h proxy: the module aiohttp is missing; pip install 'rd2h[proxy]' brings it\n"
