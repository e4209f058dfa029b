"""The proxy's side of the meta service: what it calls, and waiting for it while it is away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import Protocol, runtime_checkable

from rd2h_client.addresses import Target
from rd2h_client.errors import ClientClosedError, MetaError, MetaUnavailableError, QueueFullError
from rd2h_client.exchange_state import ExchangeState
from rd2h_client.operations import AwaitCheck
from rd2h_client.v1.rendezvous_pb2 import Outcome, RendezvousEvent

from rd2h_proxy.errors import UnavailableError

log = logging.getLogger(__name__)

_POLL_S = 0.05
# A service that is full is asked again for so long.
_CHECK_S = 1.0

META_TROUBLE = (MetaError, QueueFullError, ClientClosedError)
"""Everything by which the client says that the service did not do what was asked."""


@runtime_checkable
class Closable(Protocol):
    """An iterator that holds something until it is closed."""

    async def aclose(self) -> None:
        """Lets go of it."""


class RendezvousApi(Protocol):
    """The part of `rd2h_client.MetaClient` that requests use."""

    @property
    def target(self) -> Target:
        """Where the service listens."""

    @property
    def connected(self) -> bool:
        """Whether the stream to the service is up."""

    @property
    def outage(self) -> str:
        """Why it is not, as far as known."""

    def await_children(
        self, rendezvous_id: str, expected_children: int, ttl_s: float
    ) -> AsyncIterator[RendezvousEvent]:
        """Events of one rendezvous until it is closed; survives restarts of the service. May have `aclose`."""

    @property
    def exchange(self) -> ExchangeState:
        """What goes over the stream to the service."""

    def kick(self) -> None:
        """Sends what was put into `exchange`."""

    async def cancel(self, rendezvous_id: str, reason: str, outcome: Outcome = ...) -> None:
        """Ends a rendezvous."""

    async def report_failure(self, rendezvous_id: str, reason: str, request_ids: Iterable[str] = ()) -> None:
        """Says that children will get no KV."""

    async def check_compatibility(self, prefill_engine_id: str, decode_engine_id: str) -> None:
        """Raises MetaError with the first field that differs."""


class MetaLink:
    """Tells requests whether the meta service is there, and lets them wait for its return for a bounded time."""

    def __init__(self, api: RendezvousApi, outage_limit_s: float) -> None:
        self.api = api
        self.outage_limit_s = outage_limit_s
        self._back = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._outage_logged = False

    @property
    def connected(self) -> bool:
        """Whether the service is there now."""
        return self.api.connected

    async def wait_connected(self) -> None:
        """Returns when the service is there.

        Raises:
            UnavailableError: it did not come back within the outage limit.
        """
        if self.api.connected:
            self._outage_logged = False
            return
        # One poller serves all waiters: thousands of requests may wait, each with a timer of its own otherwise.
        if self._poller is None or self._poller.done():
            self._back.clear()
            self._poller = asyncio.create_task(self._poll(), name="meta-link-poll")
        try:
            async with asyncio.timeout(self.outage_limit_s):
                await self._back.wait()
        except TimeoutError:
            raise self.unavailable() from None

    def unavailable(self) -> UnavailableError:
        """The error for a request that the outage ends. Where the service is, and why it does not answer, is for the
        log, where it stands once an outage."""
        limit_s = self.outage_limit_s
        if not self._outage_logged:
            self._outage_logged = True
            reason = self.api.outage or "no reason known"
            log.error("clients get 503: meta service %s away for %g s: %s", self.api.target.url, limit_s, reason)
        return UnavailableError(f"the meta service did not answer within {limit_s:g} s")

    async def is_awaited(self, rendezvous_id: str, expected_children: int, ttl_s: float) -> bool:
        """Whether the service has taken an await of this client; False when it does not say.

        An await that meets a full service is sent again and again by the client, for as long as it lives and without a
        word. The same await once more, with a time limit, brings the refusal to light, and changes nothing otherwise.

        Raises:
            MetaError, QueueFullError: it refuses the await.
        """
        answer: asyncio.Future[MetaError | None] = asyncio.get_running_loop().create_future()

        def answered(error: MetaError | None) -> None:
            if not answer.done():
                answer.set_result(error)

        check = AwaitCheck(rendezvous_id, expected_children, ttl_s, time.monotonic() + _CHECK_S, answered)
        pending = self.api.exchange.pending
        pending.submit(check)
        try:
            self.api.kick()
            error = await answer
        finally:
            # Sent later it could open the rendezvous again that has ended meanwhile.
            pending.drop(check.op_id)
        if error is None:
            return True
        if isinstance(error, MetaUnavailableError):
            return False
        raise error

    async def explain_conflict(self, prefill_engine_id: str, decode_engine_id: str) -> str:
        """Why two engines do not fit, for an error message."""
        try:
            await self.api.check_compatibility(prefill_engine_id, decode_engine_id)
        except MetaUnavailableError as error:
            # Of no use to the client, and gRPC's words for a lost connection name the service's address.
            log.warning("meta service %s did not say why engines do not fit: %s", self.api.target.url, error)
        except META_TROUBLE as error:
            return f"{prefill_engine_id} and {decode_engine_id}: {error}"
        return f"{prefill_engine_id} and {decode_engine_id}: their layouts differ"

    async def _poll(self) -> None:
        while not self.api.connected:
            await asyncio.sleep(_POLL_S)
        self._outage_logged = False
        self._back.set()

    async def close(self) -> None:
        """Stops the poller."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
