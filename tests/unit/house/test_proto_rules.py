"""The proto checks of scripts/check find what they must find."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUF = Path(sys.executable).parent / "buf"
RENDEZVOUS = "proto/rd2h/meta/v1/rendezvous.proto"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    return tmp_path


def buf(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUF, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_present_protos_pass(copy: Path) -> None:
    assert buf(copy, "lint").returncode == 0
    assert buf(copy, "breaking", "--against", "proto/released.binpb").returncode == 0


def test_changed_field_is_breaking(copy: Path) -> None:
    replace(copy / RENDEZVOUS, "string request_id = 1;", "uint64 request_id = 1;")
    done = buf(copy, "breaking", "--against", "proto/released.binpb")
    assert done.returncode != 0
    assert "request_id" in done.stdout


def test_field_without_comment_is_found(copy: Path) -> None:
    replace(copy / RENDEZVOUS, "message Child {\n", "message Child {\n  string bare = 900;\n")
    done = buf(copy, "lint")
    assert done.returncode != 0
    assert '"bare" should have a non-empty comment' in done.stdout


def test_wrong_name_is_found(copy: Path) -> None:
    replace(copy / RENDEZVOUS, "message Child {\n", "message Child {\n  // Words.\n  string BareName = 900;\n")
    assert "lower_snake_case" in buf(copy, "lint").stdout
