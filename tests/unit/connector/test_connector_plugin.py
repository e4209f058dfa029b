"""What the plugin leaves behind in a vLLM process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rd2h import plugin


@contextmanager
def bare_loggers() -> Iterator[logging.Handler]:
    """Loggers as they are in an engine: vLLM's has a handler, ours and the root have none."""
    root, theirs = logging.getLogger(), logging.getLogger("vllm")
    names = plugin.LOGGERS
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).level) for name in ("", "vllm", *names)}
    marker = logging.NullHandler()
    root.handlers = []
    theirs.handlers = [marker]
    theirs.setLevel(logging.INFO)
    for name in names:
        logging.getLogger(name).handlers = []
    try:
        yield marker
    finally:
        _restore(before)


def _restore(before: dict[str, tuple[list[logging.Handler], int]]) -> None:
    for name, (handlers, level) in before.items():
        logging.getLogger(name).handlers = handlers
        logging.getLogger(name).setLevel(level)


def test_our_lines_go_where_vllms_go() -> None:
    with bare_loggers() as marker:
        plugin._log_like_vllm()
        for name in plugin.LOGGERS:
            assert logging.getLogger(name).handlers == [marker]
            assert logging.getLogger(f"{name}.part").isEnabledFor(logging.INFO)


def test_a_users_own_logging_is_left_alone() -> None:
    own = logging.NullHandler()
    with bare_loggers():
        logging.getLogger("rd2h").handlers = [own]
        plugin._log_like_vllm()
        assert logging.getLogger("rd2h").handlers == [own]
