"""A client on a background thread, for an engine's scheduler: its methods never block."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rd2h_client.client import MetaClient
from rd2h_client.engine_watch import EngineBatch
from rd2h_client.errors import MetaError, QueueFullError, RendezvousEndedError
from rd2h_client.loop_thread import background_loop
from rd2h_client.operations import End, FailureReport, Withdrawal
from rd2h_client.options import ClientOptions
from rd2h_client.registration import EngineStatus, Registration
from rd2h_client.v1 import engine_registry_pb2, rendezvous_pb2

logger = logging.getLogger("rd2h.client")

_WATCH_AGAIN_S = 2.0
"""Delay after the service refused the watch of the registry."""

_END_DEADLINE_S = 60.0
"""How long an end (withdraw, failure) is tried; the time limit of the rendezvous does the rest."""

Command = Callable[[MetaClient], None]


@dataclass(frozen=True)
class ChildNotice:
    """A child advertised here was cancelled, failed, expired or refused for good."""

    rendezvous_id: str
    request_id: str
    outcome: rendezvous_pb2.Outcome
    reason: str


class BackgroundMetaClient:
    """Registers one engine and carries its adverts. Every method is thread-safe and returns at once.

    Open adverts are said again after a lost connection or a restart of the service until they are withdrawn. At most
    `options.max_open` commands, and as many notices, wait at a time.
    """

    def __init__(
        self,
        target: str,
        options: ClientOptions,
        engine: engine_registry_pb2.Engine,
        status: Callable[[], EngineStatus],
    ) -> None:
        """`status` is called on the client's thread before each keep-alive. Nothing is started yet; start after the
        process has forked what it wants to fork.

        Raises:
            AddressError, OptionsError: the target or the options are malformed.
        """
        self._client = MetaClient(target, options)
        self._options = options
        self._engine = engine_registry_pb2.Engine()
        self._engine.CopyFrom(engine)
        self._status = status
        self._commands: deque[Command] = deque()
        self._notices: deque[ChildNotice] = deque()
        self._engines: Mapping[str, engine_registry_pb2.Engine] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepting = False
        self._wake_sent = False
        self._stop = asyncio.Event()
        self._main_task: Future[None] | None = None
        self._registration: Registration | None = None
        self.refused_total = 0
        """Withdrawals and failure reports that the service refused for good, that found no answer in time, or for which
        there was no room. (Of an advert that fails, a notice tells.)"""

    @property
    def connected(self) -> bool:
        """True while the connection to the service is up."""
        return self._client.connected

    @property
    def registration_lost(self) -> MetaError | None:
        """Why the service refused this engine for good; None while all is well."""
        return self._registration.lost if self._registration else None

    def start(self) -> None:
        """Start in the background; the service need not be there yet.

        Raises:
            RuntimeError: it was started already.
        """
        if self._loop is not None:
            raise RuntimeError("the client was started already")
        self._loop = background_loop()
        self._main_task = asyncio.run_coroutine_threadsafe(self._main(), self._loop)
        self._main_task.add_done_callback(_report_failure)

    def stop(self, timeout_s: float) -> bool:
        """End the lease and the connection; return False when that took longer than `timeout_s`."""
        if self._loop is None or self._main_task is None:
            return True
        self._loop.call_soon_threadsafe(self._stop.set)
        try:
            self._main_task.result(timeout_s)
        except TimeoutError:
            return False
        return True

    def advertise(self, rendezvous_id: str, child: rendezvous_pb2.Child) -> None:
        """Advertise a child and keep that up until it is withdrawn or has ended.

        Raises:
            QueueFullError: too many commands, or notices that nobody drains, wait.
        """
        if len(self._notices) >= self._options.max_open:
            raise QueueFullError(f"{len(self._notices)} notices wait to be drained")
        copy = rendezvous_pb2.Child()
        copy.CopyFrom(child)
        self._submit(lambda client: self._advertise(client, rendezvous_id, copy))

    def withdraw(
        self,
        rendezvous_id: str,
        request_id: str,
        outcome: rendezvous_pb2.Outcome,
        reason: str = "",
        prompt_index: int = 0,
        choice_index: int = 0,
    ) -> None:
        """Take back a child, advertised or not.

        Raises:
            QueueFullError: too many commands wait.
        """
        end = Withdrawal(rendezvous_id, request_id, outcome, reason, prompt_index, choice_index, relaxed=True)
        self._submit(lambda client: self._end(client, end))

    def report_failure(self, rendezvous_id: str, reason: str, request_ids: Sequence[str] = ()) -> None:
        """Report that children (all, when none is named) will get no KV.

        Raises:
            QueueFullError: too many commands wait.
        """
        end = FailureReport(rendezvous_id, reason, request_ids, relaxed=True)
        self._submit(lambda client: self._end(client, end))

    def update_engine(self, engine: engine_registry_pb2.Engine) -> None:
        """Register the engine anew with other facts (its layout has become known, say).

        Raises:
            QueueFullError: too many commands wait.
        """
        copy = engine_registry_pb2.Engine()
        copy.CopyFrom(engine)
        self._submit(lambda client: self._replace_engine(copy))

    def renew(self) -> None:
        """Report state, load and health now instead of at the next keep-alive.

        Raises:
            QueueFullError: too many commands wait.
        """
        self._submit(lambda client: self._renew())

    def drain_events(self) -> list[ChildNotice]:
        """Return the notices since the last call, oldest first."""
        if not self._notices:
            return []
        with self._lock:
            notices = list(self._notices)
            self._notices.clear()
        return notices

    def generation_of(self, engine_id: str) -> int | None:
        """Return the generation of a registered engine, or None when it is not registered."""
        engine = self._engines.get(engine_id)
        return engine.generation if engine is not None else None

    def engines(self) -> Mapping[str, engine_registry_pb2.Engine]:
        """Return the registered engines by engine id, as a map that is replaced and never changed."""
        return self._engines

    def _submit(self, command: Command) -> None:
        with self._lock:
            if len(self._commands) >= self._options.max_open:
                raise QueueFullError(f"{self._options.max_open} commands wait for the meta service")
            self._commands.append(command)
            if self._accepting and not self._wake_sent and self._loop is not None:
                self._wake_sent = True
                self._loop.call_soon_threadsafe(self._run_commands)

    async def _main(self) -> None:
        client = self._client
        client.on_child_ended(self._child_ended)
        client.start_connecting()
        self._registration = client.new_registration(self._engine, self._status)
        self._registration.start_keeping()
        watch = asyncio.create_task(self._follow_engines())
        with self._lock:
            self._accepting = True
        try:
            self._run_commands()
            await self._stop.wait()
            with self._lock:
                self._accepting = False
            self._run_commands()
            await self._flush()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await client.close()

    async def _flush(self) -> None:
        """Give the last commands a moment to reach the service."""
        deadline_s = time.monotonic() + 1.0
        while len(self._client.exchange.pending) and self._client.connected and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)

    def _run_commands(self) -> None:
        with self._lock:
            commands = list(self._commands)
            self._commands.clear()
            self._wake_sent = False
        for command in commands:
            command(self._client)
        if commands:
            self._client.kick()

    def _advertise(self, client: MetaClient, rendezvous_id: str, child: rendezvous_pb2.Child) -> None:
        expires_s = time.monotonic() + self._options.advert_ttl_s
        request_id = child.request_id

        def done(error: MetaError | None) -> None:
            if error is None:
                return
            outcome = rendezvous_pb2.OUTCOME_FAILED
            if isinstance(error, RendezvousEndedError):
                outcome = error.outcome
            self._note(ChildNotice(rendezvous_id, request_id, outcome, error.message))

        try:
            client.exchange.advertise(rendezvous_id, child, expires_s, expires_s, done, relaxed=True)
        except QueueFullError as error:
            self._note(ChildNotice(rendezvous_id, request_id, rendezvous_pb2.OUTCOME_FAILED, str(error)))

    def _end(self, client: MetaClient, operation: End) -> None:
        def done(error: MetaError | None) -> None:
            if error is not None:
                self.refused_total += 1
                logger.warning("%s: %s", operation.name, error)

        now_s = time.monotonic()
        try:
            client.exchange.end(operation, now_s, now_s + _END_DEADLINE_S, done)
        except QueueFullError as error:
            self.refused_total += 1
            logger.warning("%s: %s", operation.name, error)

    def _replace_engine(self, engine: engine_registry_pb2.Engine) -> None:
        if self._registration is not None:
            self._registration.replace(engine)

    def _renew(self) -> None:
        if self._registration is not None:
            self._registration.renew()

    def _child_ended(self, rendezvous_id: str, ended: rendezvous_pb2.ChildEnded) -> None:
        self._note(ChildNotice(rendezvous_id, ended.request_id, ended.outcome, ended.reason))

    def _note(self, notice: ChildNotice) -> None:
        """Keep a notice. There is at most one for an advert, and `advertise` refuses while too many wait."""
        with self._lock:
            self._notices.append(notice)

    async def _follow_engines(self) -> None:
        refusal = ""
        while True:
            try:
                async for batch in self._client.watch_engines():
                    self._engines_changed(batch)
                    refusal = ""
            except MetaError as error:
                # As an error once, not each time it comes again.
                level, refusal = logging.DEBUG if str(error) == refusal else logging.ERROR, str(error)
                logger.log(level, "the registry cannot be followed; tried every %g s: %s", _WATCH_AGAIN_S, error)
            await asyncio.sleep(_WATCH_AGAIN_S)

    def _engines_changed(self, batch: EngineBatch) -> None:
        engines = {} if batch.snapshot else dict(self._engines)
        for event in batch.events:
            engine = event.engine
            if event.kind == engine_registry_pb2.EngineEvent.KIND_REMOVED:
                engines.pop(engine.engine_id, None)
            else:
                engines[engine.engine_id] = engine
        self._engines = engines  # replaced as a whole: readers on other threads need no lock


def _report_failure(main: Future[None]) -> None:
    if not main.cancelled() and (error := main.exception()) is not None:
        logger.critical("the client of the meta service has broken", exc_info=error)
