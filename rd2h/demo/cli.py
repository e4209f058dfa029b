"""`rd2h demo`: the whole chain on this machine."""

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rd2h.demo.driver import Demo
from rd2h.demo.sparse import SparseDemo

DEFAULT_PROMPT = "Once upon a time, in a data centre by the sea, a small cache of keys and values set out to"
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the demo."""
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="what to complete in the streamed part")
    parser.add_argument(
        "--sparse",
        action="store_true",
        help="a sparse-attention model, with main KV of Decode in a host pool",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        help="keep logs and timelines here (default: a temporary folder, removed when everything holds)",
    )


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 when every check holds, 1 when one does not, 130 after Ctrl-C."""
    log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="rd2h-demo-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    code = 1
    try:
        with _termination_raises():
            if args.sparse:
                code = SparseDemo(log_dir.resolve(), args.prompt, _say).run().exit_code
            else:
                code = Demo(log_dir.resolve(), args.prompt, _say, _show).run().exit_code
    except KeyboardInterrupt:
        _say("interrupted; every process is stopped")
        code = EXIT_INTERRUPTED
    finally:
        if code == 0 and args.log_dir is None:
            shutil.rmtree(log_dir, ignore_errors=True)
        else:
            _say(f"logs: {log_dir}")
    return code


@contextlib.contextmanager
def _termination_raises() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo the way Ctrl-C does, so that its processes are stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Once is enough: what follows is clean-up that must not be interrupted.
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def _say(text: str) -> None:
    print(text, flush=True)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
