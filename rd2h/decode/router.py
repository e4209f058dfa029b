"""The ROUTER socket of a Decode rank, shared by all of its serving threads.

ZeroMQ sockets are not thread-safe but may migrate between threads under a lock. So threads wait on the socket's file
descriptor, without the lock, and everything that touches the socket holds it: a message is answered by the thread that
received it, without a hop through another one.

The descriptor is edge-triggered, and any call on the socket may swallow its edge. Therefore whoever has touched the
socket and sees messages waiting either takes them itself or wakes another thread (``unattended``, ``wake``). All
threads wait on one edge-triggered epoll, which wakes one thread an edge, not all of them.
"""

import select
import threading
from collections.abc import Collection, Container
from typing import Any, NamedTuple

import zmq

from rd2h.cpus import bind_io_threads
from rd2h.errors import ConfigError
from rd2h.sockets import HotSocket
from rd2h.wakeup import Wakeup
from rd2h.wire import MAX_FRAME_BYTES

HIGH_WATER = 100_000
MAX_RECEIVE_BATCH = 16
"""Small, so that reads of the first messages begin while another thread takes in the next ones."""


class Received(NamedTuple):
    """One message of one peer; ``address`` is its IP address for a peer whose identity is new, else empty."""

    identity: bytes
    payload: bytes
    address: str = ""


class SharedRouter:
    """See the module."""

    def __init__(self, host: str, port: int, cpus: Collection[int] = ()) -> None:
        self._lock = threading.Lock()
        self._wakeup = Wakeup()
        self.unattended = False
        """Messages wait in the socket and no edge will tell; cleared by ``receive``."""
        self._closed = False
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        bind_io_threads(self._context, cpus)
        socket = self._context.socket(zmq.ROUTER)
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
        self._hot = HotSocket(socket)
        self._epoll = select.epoll()
        self._epoll.register(self._hot.fd, select.EPOLLIN | select.EPOLLET)
        self._epoll.register(self._wakeup.fd, select.EPOLLIN | select.EPOLLET)

    def wake(self) -> None:
        """Make one waiting thread (or the next one that waits) return from ``wait``."""
        if not self._closed:
            self._wakeup.set()

    def wait(self) -> None:
        """Wait for messages or a wake; may return without either."""
        if not self.unattended:  # an answer that this thread itself sent may have swallowed the edge
            self._epoll.poll(None, 1)

    def receive(self, known: Container[bytes]) -> list[Received]:
        """At most ``MAX_RECEIVE_BATCH`` messages that have arrived; wakes another thread when there may be more.

        Two threads must not receive at once where the order of messages matters.
        """
        batch: list[Received] = []
        hot = self._hot
        with self._lock:
            # Most often one message waits: the first is taken without asking, then one question makes sure.
            while (message := hot.receive_routed()) is not None:
                batch.append(_received(*message, known))
                if not hot.readable():
                    break
                if len(batch) == MAX_RECEIVE_BATCH:
                    self._wakeup.set()
                    break
            self.unattended = False
        return batch

    def send(self, identity: bytes, *payloads: bytes) -> bool:
        """Send messages from any thread; False when the peer is gone or takes no more.

        The caller looks at ``unattended`` before it does anything that takes long.
        """
        with self._lock:
            if self._closed:
                return False
            try:
                for payload in payloads:
                    self._hot.send(identity, b"", payload)
                sent = True
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                    raise
                sent = False
            if self._hot.readable():
                self.unattended = True
        return sent

    def close(self) -> None:
        """Close the socket; no thread may wait or receive any more, later sends find nobody."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._hot.socket.close(0)
        self._context.term()
        self._epoll.close()
        self._wakeup.close()


def _received(identity: bytes, parts: list[zmq.Frame], known: Container[bytes]) -> Received:
    """A message of [identity, payload]; an empty delimiter is tolerated, other forms get an empty payload."""
    if len(parts) == 2 and not len(parts[0]):
        del parts[0]
    payload = parts[0].bytes if len(parts) == 1 else b""
    return Received(identity, payload, "" if identity in known else str(parts[0].get("Peer-Address")))
