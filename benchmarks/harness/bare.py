"""The yardstick: round trips of a bare DEALER/ROUTER pair in two processes; blocking calls, no poller, no threads."""

import time
from multiprocessing.connection import Connection
from typing import Any

import zmq

from rd2h.cpus import bind_io_threads, bind_this_thread

WARM_UP = 10


def serve_router(pipe: Connection) -> None:
    """Process: answer every message with as many bytes as the parent said."""
    cpus: frozenset[int] = pipe.recv()
    context: zmq.Context[Any] = zmq.Context()
    bind_this_thread(cpus)
    bind_io_threads(context, cpus)
    socket = context.socket(zmq.ROUTER)
    pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    while (job := pipe.recv()) is not None:
        messages, reply_bytes = job
        reply = bytes(reply_bytes)
        pipe.send("ready")
        for _ in range(messages):
            identity, _ = socket.recv_multipart()
            socket.send_multipart((identity, b"", reply))
    context.destroy(linger=0)


def serve_dealer(pipe: Connection) -> None:
    """Process: send messages of a given size and time each answer."""
    cpus: frozenset[int] = pipe.recv()
    context: zmq.Context[Any] = zmq.Context()
    bind_this_thread(cpus)
    bind_io_threads(context, cpus)
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{pipe.recv()}")
    while (job := pipe.recv()) is not None:
        messages, message_bytes = job
        message = bytes(message_bytes)
        times = []
        for _ in range(messages):
            begin = time.perf_counter()
            socket.send(message)
            socket.recv_multipart()
            times.append(time.perf_counter() - begin)
        pipe.send(times[WARM_UP:])
    context.destroy(linger=0)


class BarePair:
    """Handle of the two processes; pipes to a process that runs ``serve_router`` and one that runs ``serve_dealer``.

    ``cpus``: processors of the dealer and of the router, empty for any.
    """

    def __init__(self, router: Connection, dealer: Connection, cpus: tuple[frozenset[int], frozenset[int]]) -> None:
        self._router, self._dealer = router, dealer
        dealer.send(cpus[0])
        router.send(cpus[1])
        dealer.send(router.recv())

    def round_trips_s(self, count: int, message_bytes: int, reply_bytes: int) -> list[float]:
        """Times of ``count`` round trips in seconds."""
        self._router.send((count + WARM_UP, reply_bytes))
        self._router.recv()
        self._dealer.send((count + WARM_UP, message_bytes))
        times: list[float] = self._dealer.recv()
        return times
