"""The socket of one endpoint: a DEALER with its monitor. All calls are made under the publisher's lock.

The publisher waits on the descriptors, which are edge-triggered: any call on the socket may swallow an edge, so whoever
touched it looks at ``receivable`` afterwards.
"""

from enum import Enum
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rd2h.prefill.endpoint import Endpoint
from rd2h.sockets import HotSocket
from rd2h.wire import MAX_FRAME_BYTES

RECEIVE_HIGH_WATER = 100_000
SEND_HIGH_WATER = 100_000
LINGER_MS = 500
RECONNECT_MS = 24 * 3600 * 1000


class LinkEvent(Enum):
    """What the monitor saw."""

    CONNECTED = "connected"
    LOST = "lost"


_LOST_EVENTS = frozenset(
    {
        zmq.EVENT_DISCONNECTED,
        zmq.EVENT_CLOSED,
        zmq.EVENT_CONNECT_RETRIED,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    }
)


class Link:
    """One TCP session with one Decode rank; never reconnects by itself."""

    def __init__(self, endpoint: Endpoint, context: "zmq.Context[Any]", connect_s: float) -> None:
        self.endpoint = endpoint
        self._complained = False
        self._sent_since_look = False
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        # The link is closed at the first sign of loss, long before this. With ZMQ_RECONNECT_IVL -1 or ZMQ_IMMEDIATE,
        # libzmq 4.3 may drop a lost connection between two frames that are being received, and then aborts the process.
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, max(1, int(connect_s * 1000)))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        socket.setsockopt(zmq.IPV6, 1 if ":" in endpoint.key.host else 0)
        self._hot = HotSocket(socket)
        self._monitor = HotSocket(socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_LOST_EVENTS)))
        self.fds = (self._hot.fd, self._monitor.fd)
        """Descriptors to wait on."""
        host = f"[{endpoint.key.host}]" if ":" in endpoint.key.host else endpoint.key.host
        self.unusable = False
        try:
            socket.connect(f"tcp://{host}:{endpoint.key.port}")
        except zmq.ZMQError:
            # A name that does not resolve, or no address at all.
            self.unusable = True

    @property
    def receivable(self) -> bool:
        """Whether messages wait that no descriptor will tell about; only a send since the last look can cause that."""
        if not self._sent_since_look or self._hot.socket.closed:
            return False
        self._sent_since_look = False
        return self._hot.readable()

    def take_event(self) -> LinkEvent | None:
        """The most important event since the last call; a loss wins."""
        seen = None
        while self._monitor.readable():
            event = recv_monitor_message(self._monitor.socket, zmq.NOBLOCK)["event"]
            if event in _LOST_EVENTS:
                seen = LinkEvent.LOST
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and seen is None:
                seen = LinkEvent.CONNECTED
        return seen

    def receive(self) -> list[bytes]:
        """Payloads that have arrived, in order. An empty delimiter is tolerated; other multiparts count as empty."""
        payloads = []
        self._sent_since_look = False
        while self._hot.readable():
            frames = self._hot.receive()
            if len(frames) == 2 and not len(frames[0]):
                del frames[0]
            payloads.append(frames[0].bytes if len(frames) == 1 else b"")
        return payloads

    def send(self, payload: bytes) -> bool:
        """Queue a payload; False when the peer does not take any more."""
        try:
            self._sent_since_look = True
            self._hot.send(payload)
        except zmq.Again:
            return False
        return True

    def complain_once(self) -> bool:
        """True the first time: a malformed peer is logged once."""
        first, self._complained = not self._complained, True
        return first

    def close(self) -> None:
        """Close both sockets; what was sent last gets ``LINGER_MS`` to go out."""
        self._hot.socket.disable_monitor()
        self._monitor.socket.close(0)
        self._hot.socket.close(LINGER_MS)
