"""`rd2h bench NAME`: runs a module of the `benchmarks` package, which a source checkout has and a wheel does not."""

import argparse
import importlib.util
import runpy
import sys
from pathlib import Path

from rd2h.errors import Rd2hError


def _checkout() -> Path:
    """The folder that holds the `benchmarks` package. Raises Rd2hError outside a source checkout."""
    for folder in (Path.cwd(), Path(__file__).resolve().parent.parent):
        if (folder / "benchmarks").is_dir():
            return folder
    raise Rd2hError("no folder 'benchmarks' here; run this in a source checkout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's name and passes everything after it on."""
    parser.add_argument("name", nargs="?", default="", help="hotpath, controlplane, ...: in the folder benchmarks")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on, e.g. --json")


def run(args: argparse.Namespace) -> int:
    """Runs `python -m benchmarks.NAME` in this process. Raises Rd2hError for an unknown name, or none."""
    folder = _checkout()
    sys.path.insert(0, str(folder))
    module = f"benchmarks.{args.name}"
    if not args.name.isidentifier() or importlib.util.find_spec(module) is None:
        names = sorted(path.stem for path in (folder / "benchmarks").glob("*.py") if not path.stem.startswith("_"))
        raise Rd2hError(f"name={args.name!r} is not a benchmark; expected one of {', '.join(names)}")
    sys.argv = [module, *args.arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0
