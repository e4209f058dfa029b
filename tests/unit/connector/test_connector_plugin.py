"""What the plugin leaves behind in a vLLM process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rd2h import plugin


@contextmanager
def bare_loggers() -> Iterator[logging.Handler]:
    """Loggers as they are in an engine: vLLM's has a handler, ours and the root have none."""
    root, theirs = logging.getLogger(), logging.getLogger("vllm")
    ours = logging.getLogger(plugin.LOGGER)
    before = {logger.name: (logger.handlers, logger.level) for logger in (root, theirs, ours)}
    marker = logging.NullHandler()
    root.handlers = []
    theirs.handlers = [marker]
    theirs.setLevel(logging.INFO)
    ours.handlers = []
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
        assert logging.getLogger("rd2h").handlers == [marker]
        for part in ("rd2h.part", "rd2h.client"):  # the meta service's client logs under the second name
            assert logging.getLogger(part).isEnabledFor(logging.INFO)


def test_a_users_own_logging_is_left_alone() -> None:
    own = logging.NullHandler()
    with bare_loggers():
        logging.getLogger("rd2h").handlers = [own]
        plugin._log_like_vllm()
        assert logging.getLogger("rd2h").handlers == [own]
