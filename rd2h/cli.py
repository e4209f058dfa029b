"""The `rd2h` command: finds the component that a subcommand names, loads only that, and runs it.

A component is a module with `add_arguments(parser)` and `run(args) -> int`. Components are imported when they are
chosen, so that a base install (no vLLM, no proxy extra) can run what it has.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from rd2h import __version__
from rd2h.errors import Rd2hError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
OWN_PACKAGES = frozenset({"rd2h", "rd2h_meta", "rd2h_client", "rd2h_proxy"})


@dataclass(frozen=True)
class Command:
    """One subcommand: its name, the module that does it, and the extra that the module needs."""

    name: str
    module: str
    summary: str
    extra: str | None = None


COMMANDS = (
    Command("meta", "rd2h_meta.cli", "the gRPC registry and rendezvous service beside Decode (meta serve)"),
    Command("proxy", "rd2h_proxy.cli", "run the OpenAI proxy in front of Prefill and Decode engines", "proxy"),
    Command("status", "rd2h_client.status_cli", "show engines, leases and rendezvous of a meta service"),
    Command("probe", "rd2h.probe", "check registration and reads between two endpoints, without vLLM"),
    Command("demo", "rd2h.demo.cli", "whole chain on this machine with a tiny model, checked token by token", "cpu"),
    Command("bench", "rd2h.bench", "run one of the benchmarks of a source checkout"),
)

EXAMPLES = """\
examples:
  rd2h meta serve --listen 127.0.0.1:7700      the control plane of one Decode deployment
  rd2h proxy --host 127.0.0.1 --port 9000 --prefiller-hosts 127.0.0.1 --prefiller-ports 8100 \\
             --decoder-hosts 127.0.0.1 --decoder-ports 8200
  rd2h status --watch
  rd2h demo                                    needs the extra 'cpu'

`rd2h COMMAND --help` tells the options of a command.
"""


def help_text() -> str:
    """The overview that `rd2h --help` prints."""
    width = max(len(text) for text in ("-h, --help", *(command.name for command in COMMANDS))) + 2
    lines = ["usage: rd2h COMMAND [OPTIONS]", "", "Prefill/Decode disaggregation for vLLM: remote device to host.", ""]
    lines.append("commands:")
    lines += [f"  {command.name:<{width}}{command.summary}" for command in COMMANDS]
    lines += [
        "",
        "options:",
        f"  {'-h, --help':<{width}}show this text",
        f"  {'--version':<{width}}show the version",
        "",
    ]
    return "\n".join(lines) + "\n" + EXAMPLES


def find_command(name: str) -> Command | None:
    """The command of that name, or None."""
    return next((command for command in COMMANDS if command.name == name), None)


def load(command: Command) -> ModuleType | str:
    """Imports a command's module, or returns a one-line text that says what is missing."""
    try:
        return importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if missing == command.module or command.module.startswith(f"{missing}."):
            return f"rd2h {command.name}: not part of this installation (no module {missing})"
        return missing_text(command, missing)


def missing_text(command: Command, module: str) -> str:
    """One line that names the missing module and, where there is one, the extra that brings it."""
    hint = f"; pip install 'rd2h[{command.extra}]' brings it" if command.extra else ""
    return f"rd2h {command.name}: the module {module} is missing{hint}"


def _complain(text: str) -> int:
    print(text, file=sys.stderr)
    return EXIT_USAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit code: 2 for wrong use, 130 for Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0 if argv else EXIT_USAGE
    if argv[0] == "--version":
        print(f"rd2h {__version__}")
        return 0
    command = find_command(argv[0])
    if command is None:
        allowed = ", ".join(known.name for known in COMMANDS)
        return _complain(f"rd2h: command={argv[0]!r} is not known; expected one of {allowed}")
    component = load(command)
    if isinstance(component, str):
        return _complain(component)
    parser = argparse.ArgumentParser(prog=f"rd2h {command.name}", description=_capital(command.summary))
    component.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    try:
        return int(component.run(args))
    except Rd2hError as error:
        return _complain(f"rd2h {command.name}: {error}")
    except ModuleNotFoundError as error:
        # Components import what is heavy only when they run. A missing module of our own is a defect, not an extra.
        if error.name is None or error.name.partition(".")[0] in OWN_PACKAGES:
            raise
        return _complain(missing_text(command, error.name))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (`| head`) went away; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


if __name__ == "__main__":
    raise SystemExit(main())
