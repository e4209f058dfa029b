"""Decode's puller: answers every ready message, reads KV into its destination, reports each child once.

``read_threads + 1`` equal threads take messages in and serve them: the thread that receives a message also reads and
answers, so nothing is handed over on the way. At most ``read_threads`` of them serve at a time, so one is always left
to receive, however long reads take; and a connection's messages are begun and answered by one thread at a time, in
order, while up to two of its reads run. A keeper thread sends heartbeats and watches over time limits. ``PullBook``
holds all shared state under one lock that is never held during a read or a send. Connections with slow reads, however
many, leave one serving thread to the others (``ServiceQueue``).

Bounds: ``max_connections`` connections (the longest silent one that feeds no child gives way), ``MAX_JOBS`` queued
messages a connection, ``read_threads`` reads at a time, ``park_timeout_s`` for a message whose destination is not
known yet, ``idle_timeout_s`` for a child without progress, ``hold_s`` for blocks after an engine error.
"""

import logging
import threading
import time
from collections.abc import Sequence

from rd2h.children import ChildSpec, Finished
from rd2h.cpus import bind_this_thread
from rd2h.decode.book import PullBook
from rd2h.decode.connection import Connection
from rd2h.decode.destination import Destination
from rd2h.decode.options import PullerOptions
from rd2h.decode.router import SharedRouter
from rd2h.decode.service import SLOW_S, ServiceQueue
from rd2h.decode.steps import Answer, ReadEnd, ReadTask, Turn
from rd2h.engines import READ_OK, ReadCode, ReadResult, TransferEngine
from rd2h.errors import EngineError
from rd2h.stats import TransferStats
from rd2h.timeline import Timeline
from rd2h.wire import encode_ping, encode_stop_sending

logger = logging.getLogger(__name__)

CLOCK = time.CLOCK_BOOTTIME


class Puller:
    """See the module."""

    def __init__(
        self,
        options: PullerOptions,
        destination: Destination,
        engine: TransferEngine,
        stats: TransferStats,
        timeline: Timeline,
    ) -> None:
        self._options, self._engine, self._stats, self._timeline = options, engine, stats, timeline
        self._book = PullBook(options, destination, stats)
        self._router = SharedRouter(options.bind_host, options.port, options.cpus)
        self._queue = ServiceQueue(options.read_threads)
        self._receiving = threading.Lock()
        """Held from taking messages out of the socket until the book has them: their order must not change."""
        self._stopping = False
        self._nudge = threading.Event()
        self._next_ping_s = 0.0
        self._threads = [
            threading.Thread(target=self._serve_loop, name=f"rd2h-puller-{index}", daemon=True)
            for index in range(options.read_threads + 1)
        ]
        self._threads.append(threading.Thread(target=self._keep, name="rd2h-keeper", daemon=True))

    @property
    def port(self) -> int:
        """The port that was bound."""
        return self._router.port

    @property
    def alive(self) -> bool:
        """Whether every thread of the data path runs."""
        return all(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Start no new read, wait for running ones, close the socket."""
        self._book.close()
        self._stopping = True
        self._router.wake()
        self._nudge.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._router.close()

    # --- the connector's worker thread ---

    def add(self, specs: Sequence[ChildSpec]) -> None:
        """Destinations that may be written from now on; messages that waited for them go ahead."""
        self._submit(self._book.add(specs, _now_s()))

    def trust(self, generations: frozenset[int]) -> None:
        """Prefill generations that are registered now; only they are read from."""
        self._submit(self._book.trust(generations, _now_s()))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Fence requests that vLLM no longer wants, and tell their Prefills to stop."""
        for connection, generation, token in self._book.abort(request_ids, _now_s()):
            self._send_aside(connection.identity, encode_stop_sending(generation, [token]))

    def fail(self, token: bytes, reason: str) -> None:
        """End a child for a reason known elsewhere (its Prefill failed)."""
        for connection, generation in self._book.fail(token, reason, _now_s()):
            self._send_aside(connection.identity, encode_stop_sending(generation, [token]))

    def take_finished(self) -> list[Finished]:
        """Children that became final since the last call, each once in its life."""
        finished = self._book.take_finished(_now_s())
        for child in finished:
            self._timeline.event("request_done", request=child.request_id, outcome=child.outcome.value)
        return finished

    def counts(self) -> tuple[int, int, int]:
        """(children being pulled, connections parked, reads in flight)."""
        return self._book.counts()

    def _submit(self, connections: Sequence[Connection]) -> None:
        for connection in connections:
            self._queue.put(connection)
        if connections:
            self._router.wake()

    def _send_aside(self, identity: bytes, payload: bytes) -> bool:
        """Send from a thread that does not receive afterwards."""
        sent = self._router.send(identity, payload)
        if self._router.unattended:
            self._router.wake()
        return sent

    # --- serving threads ---

    def _serve_loop(self) -> None:
        try:
            bind_this_thread(self._options.cpus)
            served = slow = False
            while not self._stopping:
                if not served or self._router.unattended:  # serving ends with a look at the socket, if it touches it
                    self._receive()
                connection, slow, more = self._queue.take(after=served, slow=slow)
                served = connection is not None
                if connection is None:
                    self._router.wait()
                    continue
                if more:
                    self._router.wake()
                self._serve(connection)
            # Reads that have returned end in the book, though no new ones begin.
            while (taken := self._queue.take(after=served, slow=slow))[0] is not None:
                served, slow = True, taken[1]
                self._serve(taken[0])
        except Exception:
            logger.exception("rd2h puller thread died")
            raise
        finally:
            self._router.wake()  # pass a stop on to the next waiting thread

    def _receive(self) -> None:
        book = self._book
        with self._receiving:
            for received in self._router.receive(book.connections):
                connection, answer = book.accept(received, _now_s(), _now_ns())
                if answer is not None:
                    self._router.send(received.identity, *answer.payloads)
                if connection is not None:
                    self._queue.put(connection)

    def _serve(self, connection: Connection) -> None:
        """Handle messages of one connection until none is left, or the next must wait, or other connections wait."""
        book = self._book
        while (step := book.next_step(connection, _now_s(), _now_ns())) is not None:
            if self._router.unattended:
                self._router.wake()  # this step may take long
            if isinstance(step, ReadTask):
                if step.turn is Turn.PASSED_ON:
                    self._queue.put(connection)
                    self._router.wake()
                begin_s = time.perf_counter()
                result = self._read(step)
                ended = ReadEnd(result, time.perf_counter() - begin_s, _now_ns())
                if step.turn is not Turn.KEPT:
                    if book.read_returned(connection, step, ended):
                        continue
                    return
                answer = book.finish_read(connection, step, ended, _now_s(), _now_ns())
            elif step.open_session is not None:
                answer = self._open(connection, step)
            else:
                answer = step
            if answer.payloads and not self._router.send(connection.identity, *answer.payloads):
                book.drop(connection.identity, "the connection to Prefill was lost", _now_s())
            if self._queue.others_wait or connection.read_s >= SLOW_S:
                self._queue.put(connection)  # still busy: its turn comes after theirs, if others wait
                return
        if connection.parked:
            self._nudge.set()  # the keeper watches over the parking time

    def _open(self, connection: Connection, answer: Answer) -> Answer:
        try:
            self._engine.open_session(answer.open_session or "")
            error = ""
        except EngineError as problem:
            error = str(problem)
        except Exception as problem:
            # A defect of the engine costs the Prefill whose session it is, not the thread.
            logger.exception("rd2h: the transfer engine raised while it opened a session")
            error = f"the transfer engine raised {type(problem).__name__}: {problem}"
        return self._book.session_opened(connection, _now_ns(), error)

    def _read(self, task: ReadTask) -> ReadResult:
        if task.nothing_to_read:
            return READ_OK
        descriptors = task.descriptors
        try:
            result = self._engine.batch_transfer_sync_read(
                task.session, descriptors.local, descriptors.peer, descriptors.lengths
            )
        except Exception as error:
            # A defect of the engine. The read must end in the book all the same, or its requests would never be
            # reported and this thread's turn never be given back.
            logger.exception("rd2h: the transfer engine raised during a read")
            return ReadResult(ReadCode.NATIVE_EXCEPTION, f"the transfer engine raised {type(error).__name__}: {error}")
        if self._timeline.enabled and result.ok:
            requests = list(task.request_ids)
            for head, _, nbytes in task.layers:
                self._timeline.event("layer_read", layer=head.layer_idx, bytes=nbytes, requests=requests)
        return result

    # --- keeper thread ---

    def _keep(self) -> None:
        try:
            while not self._stopping:
                self._tick()
                self._nudge.wait(self._pause_s())
                self._nudge.clear()
        except Exception:
            logger.exception("rd2h keeper thread died")
            raise

    def _pause_s(self) -> float:
        due_s = self._book.next_deadline_s()
        wake_s = self._next_ping_s if due_s is None else min(due_s, self._next_ping_s)
        return max(0.0, wake_s - _now_s())

    def _tick(self) -> None:
        now_s = _now_s()
        self._submit(self._book.unpark_due(now_s))
        if now_s < self._next_ping_s:
            return
        self._next_ping_s = now_s + self._options.ping_interval_s
        for identity in self._book.to_ping(now_s):
            if not self._send_aside(identity, encode_ping(self._options.generation, _now_ns())):
                self._book.drop(identity, "the connection to Prefill was lost", now_s)


def _now_s() -> float:
    return time.clock_gettime(CLOCK)


def _now_ns() -> int:
    return time.clock_gettime_ns(CLOCK)
