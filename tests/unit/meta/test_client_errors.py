"""What a failed call becomes, whatever the other side puts into its trailer."""

import grpc
import pytest
from rd2h_client.errors import MetaExhaustedError, RendezvousEndedError, from_rpc_error
from rd2h_client.v1.rendezvous_pb2 import OUTCOME_FAILED


class Failed(grpc.RpcError):
    """A call that ended with a status."""

    def __init__(self, code: grpc.StatusCode, **trailing: str | bytes) -> None:
        self._code = code
        self._trailing = tuple((key.replace("_", "-"), value) for key, value in trailing.items())

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "details"

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._trailing


def test_delay_and_outcome_come_from_the_trailer() -> None:
    error = from_rpc_error(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_ms="250"))
    assert isinstance(error, MetaExhaustedError)
    assert error.retry_after_s == 0.25
    ended = from_rpc_error(Failed(grpc.StatusCode.FAILED_PRECONDITION, rendezvous_outcome=str(int(OUTCOME_FAILED))))
    assert isinstance(ended, RendezvousEndedError)
    assert ended.outcome == OUTCOME_FAILED


@pytest.mark.parametrize("nonsense", ["soon", "", "-5", "1e9", "9" * 5000, b"\xff"])
def test_nonsense_in_the_trailer_is_left_out(nonsense: str | bytes) -> None:
    error = from_rpc_error(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_ms=nonsense))
    assert isinstance(error, MetaExhaustedError)
    assert error.retry_after_s is None
    from_rpc_error(Failed(grpc.StatusCode.FAILED_PRECONDITION, rendezvous_outcome=nonsense))
