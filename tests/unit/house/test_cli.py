"""The `rd2h` command finds components lazily and explains what is missing in one line."""

import subprocess
import sys
import types

import pytest

from rd2h import __version__, cli


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"  {command.name} " in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"rd2h {__version__}\n"


def test_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["no-such"]) == cli.EXIT_USAGE
    names = ", ".join(command.name for command in cli.COMMANDS)
    assert capsys.readouterr().err == f"rd2h: command='no-such' is not known; expected one of {names}\n"


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> object:
        raise ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp")

    monkeypatch.setattr(cli.importlib, "import_module", refuse)
    assert cli.main(["proxy"]) == cli.EXIT_USAGE
    assert capsys.readouterr().err == (
        "rd2h proxy: the module aiohttp is missing; pip install 'rd2h[proxy]' brings it\n"
    )


def test_extra_missing_only_at_run_time_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    component = types.ModuleType("component")

    def run(args: object) -> int:
        raise ModuleNotFoundError("no", name=missing)

    component.__dict__.update(add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: component)
    missing = "aiohttp"
    assert cli.main(["proxy"]) == cli.EXIT_USAGE
    assert "rd2h[proxy]" in capsys.readouterr().err
    missing = "rd2h_proxy.lost"
    with pytest.raises(ModuleNotFoundError):
        cli.main(["proxy"])


def test_absent_component_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("odd", "rd2h.no_such_module", "nothing"),))
    assert cli.main(["odd"]) == cli.EXIT_USAGE
    assert "not part of this installation" in capsys.readouterr().err


def test_help_loads_no_heavy_module() -> None:
    code = (
        "import sys; from rd2h.cli import main; main(['--help']);"
        "heavy = {'vllm', 'torch', 'grpc', 'zmq', 'aiohttp', 'numpy'};"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
