"""The blocking client: unary calls only, for scripts and simple tools."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import grpc

from rd2h_client.addresses import parse_target
from rd2h_client.channels import call_metadata, channel_credentials, channel_options
from rd2h_client.errors import from_rpc_error, retry_delay_s
from rd2h_client.options import ClientOptions
from rd2h_client.v1 import engine_registry_pb2, rendezvous_pb2
from rd2h_client.v1.engine_registry_pb2_grpc import EngineRegistryStub
from rd2h_client.v1.rendezvous_pb2_grpc import RendezvousStub

_LOOK_S = 1.0


class SyncMetaClient:
    """Blocking calls with deadlines; thread-safe. Every method raises MetaError when refused or without an answer."""

    def __init__(self, target: str, options: ClientOptions = ClientOptions()) -> None:  # noqa: B008  # frozen
        """Connects in the background.

        Raises:
            AddressError: the target is malformed.
            OptionsError: the options contradict each other.
        """
        self.target = parse_target(target)
        self._options = options
        self._metadata = call_metadata(self.target, options)
        credentials = channel_credentials(self.target, options)
        arguments = channel_options(options)
        self._channel: grpc.Channel = (
            grpc.insecure_channel(self.target.authority, arguments)
            if credentials is None
            else grpc.secure_channel(self.target.authority, credentials, arguments)
        )
        self._registry: Any = EngineRegistryStub(self._channel)
        self._rendezvous: Any = RendezvousStub(self._channel)

    def __enter__(self) -> SyncMetaClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def advertise(self, rendezvous_id: str, child: rendezvous_pb2.Child, ttl_s: float | None = None) -> None:
        """Advertise a child. Nobody advertises it again after a restart of the service: that is MetaClient's work."""
        life_s = ttl_s if ttl_s is not None else self._options.advert_ttl_s
        request = rendezvous_pb2.AdvertiseRequest(
            rendezvous_id=rendezvous_id, child=child, ttl_ms=max(1, round(life_s * 1000))
        )
        self._call(self._rendezvous.Advertise, request)

    def withdraw(
        self,
        rendezvous_id: str,
        request_id: str,
        outcome: rendezvous_pb2.Outcome,
        reason: str = "",
        prompt_index: int = 0,
        choice_index: int = 0,
    ) -> None:
        """Take back a child, advertised or not."""
        request = rendezvous_pb2.WithdrawRequest(
            rendezvous_id=rendezvous_id,
            request_id=request_id,
            outcome=outcome,
            reason=reason,
            prompt_index=prompt_index,
            choice_index=choice_index,
        )
        self._call(self._rendezvous.Withdraw, request)

    def cancel(
        self, rendezvous_id: str, reason: str, outcome: rendezvous_pb2.Outcome = rendezvous_pb2.OUTCOME_ABORTED
    ) -> None:
        """End a whole rendezvous."""
        request = rendezvous_pb2.CancelRequest(rendezvous_id=rendezvous_id, reason=reason, outcome=outcome)
        self._call(self._rendezvous.Cancel, request)

    def report_failure(self, rendezvous_id: str, reason: str, request_ids: Iterable[str] = ()) -> None:
        """Report that children (all, when none is named) will get no KV."""
        request = rendezvous_pb2.ReportFailureRequest(
            rendezvous_id=rendezvous_id, reason=reason, request_ids=request_ids
        )
        self._call(self._rendezvous.ReportFailure, request)

    def list_engines(
        self, role: engine_registry_pb2.EngineRole = engine_registry_pb2.ENGINE_ROLE_UNSPECIFIED
    ) -> list[engine_registry_pb2.Engine]:
        """Return the engines with a live lease."""
        return list(self.list_leases(role).engines)

    def list_leases(
        self, role: engine_registry_pb2.EngineRole = engine_registry_pb2.ENGINE_ROLE_UNSPECIFIED
    ) -> engine_registry_pb2.ListEnginesResponse:
        """Return the engines with their leases, the revision and the service's identity."""
        request = engine_registry_pb2.ListEnginesRequest(role=role)
        response: engine_registry_pb2.ListEnginesResponse = self._call(self._registry.ListEngines, request)
        return response

    def check_compatibility(self, prefill_engine_id: str, decode_engine_id: str) -> None:
        """Check that two registered engines fit together."""
        request = engine_registry_pb2.CheckCompatibilityRequest(
            prefill_engine_id=prefill_engine_id, decode_engine_id=decode_engine_id
        )
        self._call(self._registry.CheckCompatibility, request)

    def stats(self) -> rendezvous_pb2.GetRendezvousStatsResponse:
        """Return counts and recent failures."""
        request = rendezvous_pb2.GetRendezvousStatsRequest()
        response: rendezvous_pb2.GetRendezvousStatsResponse = self._call(self._rendezvous.GetRendezvousStats, request)
        return response

    def connect_failure(self) -> str:
        """Return in words why the service cannot be reached; empty when it can be, or when nothing is known."""
        request = rendezvous_pb2.GetRendezvousStatsRequest()
        try:
            # Without waiting for a connection a call ends with what the last try to connect met.
            self._rendezvous.GetRendezvousStats(request, timeout=_LOOK_S, metadata=self._metadata, wait_for_ready=False)
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            return failure.message if failure.code is grpc.StatusCode.UNAVAILABLE else ""
        return ""

    def _call(self, method: Any, request: Any) -> Any:
        deadline_s = time.monotonic() + self._options.deadline_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return method(request, timeout=left_s, metadata=self._metadata, wait_for_ready=True)
            except grpc.RpcError as error:
                refusal = from_rpc_error(error, self._options.deadline_s)
                delay_s = retry_delay_s(refusal, deadline_s - time.monotonic())
                if delay_s is None:
                    raise refusal from error
            time.sleep(delay_s)
