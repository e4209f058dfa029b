"""The socket of one endpoint: a DEALER with its monitor. All calls are made under the publisher's lock.

The publisher waits on the descriptors, which are edge-triggered: any call on the socket may swallow an edge, so whoever
touched it looks at ``receivable`` afterwards.
"""

from enum import Enum
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rd2h.prefill.endpoint import Endpoint
from rd2h.wire import MAX_FRAME_BYTES

RECEIVE_HIGH_WATER = 100_000
SEND_HIGH_WATER = 100_000
LINGER_MS = 500


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
        socket = self._socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, max(1, int(connect_s * 1000)))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        socket.setsockopt(zmq.IPV6, 1 if ":" in endpoint.key.host else 0)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_LOST_EVENTS))
        self.fds = (int(socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD)))
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
        """Whether messages wait in the socket."""
        return not self._socket.closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def take_event(self) -> LinkEvent | None:
        """The most important event since the last call; a loss wins."""
        seen = None
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event in _LOST_EVENTS:
                seen = LinkEvent.LOST
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and seen is None:
                seen = LinkEvent.CONNECTED
        return seen

    def receive(self) -> list[bytes]:
        """Payloads that have arrived, in order. An empty delimiter is tolerated; other multiparts count as empty."""
        payloads = []
        while self.receivable:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if frames and frames[0] == b"":
                frames = frames[1:]
            payloads.append(frames[0] if len(frames) == 1 else b"")
        return payloads

    def send(self, payload: bytes) -> bool:
        """Queue a payload; False when the peer does not take any more."""
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def complain_once(self) -> bool:
        """True the first time: a malformed peer is logged once."""
        first, self._complained = not self._complained, True
        return first

    def close(self) -> None:
        """Close both sockets; what was sent last gets ``LINGER_MS`` to go out."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(LINGER_MS)
