"""The ROUTER socket of a Decode rank, shared by the receiving thread and the reading threads.

ZeroMQ sockets are not thread-safe but may migrate between threads under a lock. So the receiving thread waits on the
socket's file descriptor, without the lock, and everything that touches the socket holds it; an acknowledgement then
goes out from the thread that did the read, without a hop through another one. The descriptor is edge-triggered:
whoever touched the socket and finds messages waiting wakes the receiver.
"""

import select
import threading
from dataclasses import dataclass
from typing import Any

import zmq

from rd2h.errors import ConfigError
from rd2h.wakeup import Wakeup
from rd2h.wire import MAX_FRAME_BYTES

HIGH_WATER = 100_000
MAX_RECEIVE_BATCH = 256


@dataclass(frozen=True, slots=True)
class Received:
    """One message of one peer; ``address`` is its IP address for a peer whose identity is new, else empty."""

    identity: bytes
    payload: bytes
    address: str = ""


class SharedRouter:
    """See the module."""

    def __init__(self, host: str, port: int) -> None:
        self._lock = threading.Lock()
        self._wakeup = Wakeup()
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        socket = self._socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        address = f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}"
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(0)
            self._context.term()
            raise ConfigError(f"kv_port {port}: cannot listen on {address}: {error}", key="kv_port") from error
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._poll = select.poll()
        self._poll.register(int(socket.getsockopt(zmq.FD)), select.POLLIN)
        self._poll.register(self._wakeup.fd, select.POLLIN)

    def wake(self) -> None:
        """Make ``receive`` return."""
        self._wakeup.set()

    def receive(self, timeout_ms: int | None, known: "dict[bytes, Any]") -> list[Received]:
        """Wait for messages, a wake or the time limit; at most ``MAX_RECEIVE_BATCH``. Receiving thread only."""
        batch = self._drain(known)
        if batch:
            return batch
        self._poll.poll(timeout_ms)
        self._wakeup.clear()
        return self._drain(known)

    def _drain(self, known: "dict[bytes, Any]") -> list[Received]:
        batch: list[Received] = []
        with self._lock:
            while len(batch) < MAX_RECEIVE_BATCH:
                try:
                    identity = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                address = ""
                if identity in known:
                    payload = self._socket.recv(zmq.NOBLOCK)
                else:
                    frame = self._socket.recv(zmq.NOBLOCK, copy=False)
                    payload = frame.bytes
                    address = str(frame.get("Peer-Address"))
                extra = []
                while self._socket.getsockopt(zmq.RCVMORE):
                    extra.append(self._socket.recv(zmq.NOBLOCK))
                if payload == b"" and len(extra) == 1:
                    payload, extra = extra[0], []
                batch.append(Received(identity, b"" if extra else payload, address))
        return batch

    def send(self, identity: bytes, payload: bytes) -> bool:
        """Send from any thread; False when the peer is gone or takes no more."""
        with self._lock:
            try:
                self._socket.send_multipart((identity, b"", payload), zmq.NOBLOCK)
                sent = True
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                    raise
                sent = False
            waiting = int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        if waiting:
            self._wakeup.set()
        return sent

    def close(self) -> None:
        """Close the socket; no thread may use it any more."""
        with self._lock:
            self._socket.close(0)
        self._context.term()
        self._wakeup.close()
