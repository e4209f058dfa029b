"""Clients that leave at any moment: both engines drop the request, all blocks come back, the chain goes on."""

import json
import random
import socket
import time
import urllib.parse

import pytest
from engine_state import wait_idle

from rd2h.demo.cases import Case
from rd2h.demo.chain import ConnectedEngine
from rd2h.demo.completions import complete
from rd2h.demo.process import ManagedProcess

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]
# Longer than several prefill chunks, so that a client can leave while Prefill computes.
PARAGRAPH = "The client has the right to leave the table before, during and after the soup, and often does. " * 9


def send_and_leave(url: str, body: dict[str, object], after_s: float) -> None:
    """Sends a request, reads what comes within `after_s`, and closes the connection."""
    address = urllib.parse.urlsplit(url)
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    deadline = time.monotonic() + after_s
    with socket.create_connection((address.hostname, address.port), timeout=5) as client:
        client.sendall(head.encode() + payload)
        while (left_s := deadline - time.monotonic()) > 0:
            client.settimeout(left_s)
            try:
                if not client.recv(65536):
                    return
            except TimeoutError:
                return


@pytest.mark.parametrize("after_ms", [0, 5, 15, 30, 60, 120, 250, 500])
@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
def test_client_leaves(
    after_ms: int,
    streaming: bool,
    proxy: ManagedProcess,
    single: ManagedProcess,
    prefill: ConnectedEngine,
    decode: ConnectedEngine,
) -> None:
    prompt = f"{after_ms} ms, {streaming}: {PARAGRAPH}"
    body = Case("leave", (prompt,), max_tokens=2000).body() | {"stream": streaming}
    send_and_leave(proxy.url, body, after_ms / 1000)
    wait_idle(prefill, decode)
    # What the aborted request left in the prefix caches must be sound.
    again = Case("again", (prompt,))
    assert complete(proxy.url, again.body()) == complete(single.url, again.body())


def test_many_clients_leave_while_others_stay(
    proxy: ManagedProcess, single: ManagedProcess, prefill: ConnectedEngine, decode: ConnectedEngine
) -> None:
    source = random.Random(5)
    for turn in range(12):
        leaving = Case("leave", (f"leaver {turn} {PARAGRAPH}", f"leaver too {turn} {PARAGRAPH}"), max_tokens=2000)
        send_and_leave(proxy.url, leaving.body() | {"stream": True}, source.uniform(0, 0.2))
        staying = Case("stay", (f"stayer {turn} {PARAGRAPH[: 40 * turn + 1]}",))
        assert complete(proxy.url, staying.body()) == complete(single.url, staying.body())
    wait_idle(prefill, decode)
