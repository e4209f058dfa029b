"""A Decode rank that answers when it is told to: real socket, real messages, no reads."""

import threading
import time
from collections.abc import Callable

import zmq

from rd2h.wire import (
    MfMeta,
    PrefillFailed,
    ReadyHead,
    decode_from_prefill,
    encode_mf_ack,
    encode_ping,
    encode_read_done,
)

GENERATION = 4711


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


class ScriptedDecode:
    """Shakes hands at once, sends heartbeats, and acknowledges a layer only after ``release``. A context manager."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._lock = threading.Lock()
        self._held: list[tuple[bytes, ReadyHead]] = []
        self._released: list[tuple[bytes, ReadyHead]] = []
        self.seen: list[int] = []
        self.failed: list[tuple[int, str]] = []
        """(layers seen before it, reason) of every child that Prefill gave up."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "ScriptedDecode":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._socket.close()
        self._context.term()

    @property
    def held(self) -> list[int]:
        """Layers that wait for their acknowledgement."""
        with self._lock:
            return [ready.layer_idx for _, ready in self._held]

    def release(self, layer_idx: int) -> None:
        """Acknowledge one layer."""
        with self._lock:
            for item in self._held:
                if item[1].layer_idx == layer_idx:
                    self._held.remove(item)
                    self._released.append(item)
                    return
        raise AssertionError(f"layer {layer_idx} is not waiting")

    def release_all(self) -> None:
        with self._lock:
            self._released += self._held
            self._held = []

    def _run(self) -> None:
        peers: set[bytes] = set()
        next_ping = 0.0
        while not self._stop.is_set():
            if self._socket.poll(10):
                identity, *_, payload = self._socket.recv_multipart()
                peers.add(identity)
                message = decode_from_prefill(payload)
                if isinstance(message, MfMeta):
                    self._socket.send_multipart([identity, b"", encode_mf_ack(GENERATION, time.monotonic_ns())])
                elif isinstance(message, PrefillFailed):
                    self.failed += [(len(self.seen), failure.reason) for failure in message.failures]
                elif isinstance(message, ReadyHead):
                    with self._lock:
                        self._held.append((identity, message))
                        self.seen.append(message.layer_idx)
            with self._lock:
                released, self._released = self._released, []
            for identity, ready in released:
                self._socket.send_multipart([identity, b"", encode_read_done(ready.layer_idx, ready.seq)])
            if time.monotonic() >= next_ping:
                next_ping = time.monotonic() + 0.5
                for identity in peers:
                    self._socket.send_multipart([identity, b"", encode_ping(GENERATION, time.monotonic_ns())])
