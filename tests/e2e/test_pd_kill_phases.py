"""Prefill or Decode dies in each phase of a request's life: its client hears of it soon, or never notices."""

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rd2h.demo.cases import Case
from rd2h.demo.chain import Chain, ConnectedEngine, MetaProcess
from rd2h.demo.completions import CompletionError, complete, stream
from rd2h.demo.process import ManagedProcess

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]
ANSWER_S = 10.0
# A dozen chunks, so that a kill at the first one finds most of the prompt still to come.
LONG_PROMPT = ("The lamp burns low, the kettle sings, and nobody remembers who was to lay the table. " * 40)[:3100]

Parts = tuple[ManagedProcess, ConnectedEngine, ConnectedEngine]


@pytest.fixture
def parts(chain: Chain, meta: MetaProcess) -> Iterator[Parts]:
    """A pair and a proxy of the test's own."""
    prefill, decode = chain.start_prefill(meta, "phase-prefill"), chain.start_decode(meta, "phase-decode")
    chain.launcher.wait_engines([prefill.process, decode.process])
    proxy = chain.start_proxy(meta, prefill.process, decode.process, "phase-proxy")
    yield proxy, prefill, decode
    for process in (proxy, decode.process, prefill.process):
        process.stop()


class Client:
    """One streamed request on a thread of its own."""

    def __init__(self, url: str, case: Case) -> None:
        self.tokens: list[int] = []
        self.error: CompletionError | OSError | None = None
        self.first_token = threading.Event()
        self._pieces = stream(url, case.body())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for piece in self._pieces:
                self.tokens += piece.token_ids
                self.first_token.set()
        except (CompletionError, OSError) as error:
            self.error = error

    def join_or_wait(self, seconds: float) -> None:
        """Give the request time to get where it must wait; a stopped engine shows nothing to wait for."""
        self._thread.join(seconds)
        assert self._thread.is_alive(), "answered too early"

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"no answer within {timeout_s} s"


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_killed_before_the_rendezvous(parts: Parts, victim: str) -> None:
    proxy, prefill, decode = parts
    decode.process.signal_group(signal.SIGSTOP)  # its kernel takes the request in; it advertises nothing yet
    client = Client(proxy.url, Case("early", ("Knock, knock. Who is there?",)))
    client.join_or_wait(0.3)
    (prefill if victim == "prefill" else decode).process.kill()
    if victim == "prefill":
        decode.process.signal_group(signal.SIGCONT)
    client.join(ANSWER_S)
    assert client.error is not None
    assert client.tokens == []


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_killed_while_prefill_computes_and_decode_pulls(parts: Parts, victim: str) -> None:
    proxy, prefill, decode = parts
    prefill.timeline.new_events()
    client = Client(proxy.url, Case("middle", (LONG_PROMPT,)))
    wait_until(lambda: any(e.name == "ready_sent" for e in prefill.timeline.new_events()), "no layer was published")
    (prefill if victim == "prefill" else decode).process.kill()
    assert not client.first_token.is_set(), "the prompt was too short for this test"
    client.join(ANSWER_S)
    assert client.error is not None
    assert client.tokens == []
    survivor = decode if victim == "prefill" else prefill
    assert survivor.process.alive


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_killed_while_streaming(parts: Parts, single: ManagedProcess, victim: str) -> None:
    proxy, prefill, decode = parts
    case = Case("late", ("Long after the soup is eaten, ",), max_tokens=300)
    (expected,) = complete(single.url, case.body())
    client = Client(proxy.url, case)
    assert client.first_token.wait(30)
    (prefill if victim == "prefill" else decode).process.kill()
    client.join(60 if victim == "prefill" else ANSWER_S)
    if victim == "prefill":
        assert client.error is None
        assert tuple(client.tokens) == tuple(expected)
    else:
        assert client.error is not None
        assert tuple(client.tokens) == tuple(expected[: len(client.tokens)]), "nothing is repeated or made up"
