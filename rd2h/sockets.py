"""The few ZeroMQ calls of the hot path, bound once and without pyzmq's convenience layer.

That layer costs several times the call itself (attribute hooks, option enums, one option query a frame). The calls are
those of ``zmq.backend``, which every pyzmq build has.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import zmq
from zmq.backend import Socket as BackendSocket

_EVENTS, _POLLIN, _FD = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.FD)
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class HotSocket:
    """Non-blocking calls on one socket. As little thread-safe as the socket itself."""

    __slots__ = ("_get", "_recv", "_send", "socket")

    def __init__(self, socket: "zmq.Socket[Any]") -> None:
        self.socket = socket
        self._get = partial(BackendSocket.get, socket)
        self._recv: Callable[[int, bool, bool], zmq.Frame] = partial(BackendSocket.recv, socket)  # type: ignore[assignment]
        self._send = partial(BackendSocket.send, socket)

    @property
    def fd(self) -> int:
        """Edge-triggered descriptor: after an edge, and after any other call, ``readable`` tells the truth."""
        return int(self._get(_FD))

    def readable(self) -> bool:
        """Whether a message waits."""
        return (int(self._get(_EVENTS)) & _POLLIN) != 0

    def receive(self) -> list[zmq.Frame]:
        """The frames of the next message. Raises zmq.Again when none waits."""
        frame = self._recv(_NOBLOCK, False, False)
        frames = [frame]
        while frame.more:
            frame = self._recv(_NOBLOCK, False, False)
            frames.append(frame)
        return frames

    def receive_routed(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """Identity and frames of a ROUTER's next message; None when none waits."""
        try:
            identity: bytes = self._recv(_NOBLOCK, True, False)  # type: ignore[assignment]
        except zmq.Again:
            return None
        return identity, self.receive()

    def send(self, *frames: bytes) -> None:
        """Queue one message. Raises zmq.ZMQError: EAGAIN when the peer takes no more, EHOSTUNREACH when it is gone."""
        for frame in frames[:-1]:
            self._send(frame, _MORE)
        self._send(frames[-1], _NOBLOCK)
