"""Following the registry: snapshot, then changes, across lost connections and service restarts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from rd2h_client.channels import Metadata
from rd2h_client.errors import RETRYABLE, from_rpc_error
from rd2h_client.options import RetryOptions
from rd2h_client.v1 import engine_registry_pb2 as pb

logger = logging.getLogger("rd2h.client")

_LIST_AGAIN = frozenset({grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.RESOURCE_EXHAUSTED})


@dataclass(frozen=True)
class EngineBatch:
    """Changes of the registry, in order."""

    snapshot: bool
    """True when `events` (all ADDED) replace everything known before."""
    events: list[pb.EngineEvent] = field(default_factory=list)


class EngineWatch:
    """The state of one watch. Engines that are missing right after a service restart are kept until the service's
    grace period is over: they are about to register again."""

    def __init__(self, role: pb.EngineRole) -> None:
        self._role = role
        self._known: dict[str, pb.Engine] = {}
        self._absent: set[str] = set()
        self._snapshot: list[pb.EngineEvent] = []
        self._revision = 0
        self._service_id = ""
        self.absent_until_s = float("inf")
        """When `give_up_absent` is due, on the monotonic clock."""

    def request(self) -> pb.WatchEnginesRequest:
        """Return the request of a new stream, which resumes this watch or starts it."""
        # Half a snapshot of the stream before: the new one tells all of it again, and what may have gone is not in it.
        self._snapshot = []
        return pb.WatchEnginesRequest(
            role=self._role,
            after_revision=self._revision if self._service_id else 0,
            service_id=self._service_id if self._revision else "",
        )

    def list_again(self) -> None:
        """Forget the revision; what is known stays known."""
        self._revision = 0

    def receive(self, message: pb.WatchEnginesResponse, now_s: float) -> EngineBatch | None:
        """Take over a message; return what to pass on, if anything."""
        if not message.snapshot:
            self._revision = message.revision
            self._service_id = message.service_id
            for event in message.events:
                self._apply(event)
            return EngineBatch(snapshot=False, events=list(message.events)) if message.events else None
        self._snapshot.extend(message.events)
        if message.snapshot_continues:
            return None
        return self._finish_snapshot(message, now_s)

    def give_up_absent(self) -> EngineBatch:
        """The grace period is over: who has not come back is gone."""
        events = [
            pb.EngineEvent(
                kind=pb.EngineEvent.KIND_REMOVED,
                engine=self._known.pop(engine_id),
                reason=pb.EngineEvent.REASON_EXPIRED,
                revision=self._revision,
            )
            for engine_id in sorted(self._absent)
        ]
        self._absent.clear()
        self.absent_until_s = float("inf")
        return EngineBatch(snapshot=False, events=events)

    def _finish_snapshot(self, message: pb.WatchEnginesResponse, now_s: float) -> EngineBatch:
        events, self._snapshot = self._snapshot, []
        present = {event.engine.engine_id: event.engine for event in events}
        missing = {engine_id: engine for engine_id, engine in self._known.items() if engine_id not in present}
        restarted = bool(self._service_id) and message.service_id != self._service_id
        # A watch that lists again within one run of the service misses nobody; only a restart forgets engines.
        if message.grace_remaining_ms and (restarted or self._absent):
            self._absent = set(missing)
            self.absent_until_s = now_s + message.grace_remaining_ms / 1000
            events += [
                pb.EngineEvent(kind=pb.EngineEvent.KIND_ADDED, engine=engine, revision=message.revision)
                for engine in missing.values()
            ]
            self._known = {**missing, **present}
        else:
            self._absent = set()
            self.absent_until_s = float("inf")
            self._known = present
        self._revision = message.revision
        self._service_id = message.service_id
        return EngineBatch(snapshot=True, events=events)

    def _apply(self, event: pb.EngineEvent) -> None:
        engine_id = event.engine.engine_id
        self._absent.discard(engine_id)
        if event.kind == pb.EngineEvent.KIND_REMOVED:
            self._known.pop(engine_id, None)
        else:
            self._known[engine_id] = event.engine


async def watch_engines(
    stub: Any, metadata: Metadata, retry: RetryOptions, role: pb.EngineRole
) -> AsyncIterator[EngineBatch]:
    """Yield batches for ever.

    Raises:
        MetaError: the service refuses the watch for good.
    """
    watch = EngineWatch(role)
    failures = 0
    while True:
        call = stub.WatchEngines(watch.request(), metadata=metadata, wait_for_ready=True)
        reading: asyncio.Task[Any] | None = None
        try:
            while True:
                reading = reading or asyncio.create_task(call.read())
                left_s = watch.absent_until_s - time.monotonic()
                await asyncio.wait({reading}, timeout=None if left_s == float("inf") else max(0.0, left_s))
                if watch.absent_until_s <= time.monotonic():
                    yield watch.give_up_absent()
                if not reading.done():
                    continue
                message, reading = reading.result(), None
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
                    break
                failures = 0
                batch = watch.receive(message, time.monotonic())
                if batch is not None:
                    yield batch
        except grpc.aio.AioRpcError as error:
            if error.code() in _LIST_AGAIN:
                watch.list_again()
            elif error.code() not in RETRYABLE:
                raise from_rpc_error(error) from error
            logger.debug("watch ended: %s: %s", error.code().name, error.details())
        finally:
            if reading is not None:
                reading.cancel()
            call.cancel()
        failures += 1
        await asyncio.sleep(retry.delay_s(failures))
