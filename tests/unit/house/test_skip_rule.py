"""The rule that an unlisted skip fails the run, tried on small runs of their own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"
SKIPPING = "import pytest\ndef test_a():\n    pytest.skip('no device')\ndef test_b():\n    assert 1 + 1 == 2\n"


def run_pytest(folder: Path, skips: str, source: str) -> subprocess.CompletedProcess[str]:
    tests = folder / "tests"
    (tests / "unit").mkdir(parents=True)
    shutil.copy(CONFTEST, tests / "conftest.py")
    (tests / "skips.txt").write_text(skips, encoding="utf-8")
    (tests / "unit" / "test_x.py").write_text(source, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_unlisted_skip_fails_the_run(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "", SKIPPING)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "tests/unit/test_x.py::test_a | " in done.stdout
    assert "no device" in done.stdout


def test_listed_skip_passes(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "tests/unit/test_x.py::test_a | needs an NPU\n", SKIPPING)
    assert done.returncode == pytest.ExitCode.OK, done.stdout


def test_skipped_module_counts(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "", "import pytest\npytest.importorskip('no_such_module_of_ours')\n")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "tests/unit/test_x.py | " in done.stdout


def test_expected_failure_counts(tmp_path: Path) -> None:
    source = "import pytest\n@pytest.mark.xfail(reason='later')\ndef test_a():\n    assert 1 == 2\n"
    done = run_pytest(tmp_path, "", source)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout


def test_line_without_reason_is_refused(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "tests/unit/test_x.py::test_a\n", SKIPPING)
    assert done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    assert "skips.txt line 1" in done.stdout + done.stderr
