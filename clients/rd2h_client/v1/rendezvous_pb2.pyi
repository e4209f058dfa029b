from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_DONE: _ClassVar[Outcome]
    OUTCOME_ABORTED: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
    OUTCOME_EXPIRED: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_DONE: Outcome
OUTCOME_ABORTED: Outcome
OUTCOME_FAILED: Outcome
OUTCOME_EXPIRED: Outcome

class Child(_message.Message):
    __slots__ = ("request_id", "token", "engine_id", "generation", "host", "base_port", "tp_size", "pcp_size", "dcp_size", "cached_tokens", "wire_version", "layout_fingerprint", "prompt_index", "choice_index", "prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    BASE_PORT_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PCP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DCP_SIZE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token: bytes
    engine_id: str
    generation: int
    host: str
    base_port: int
    tp_size: int
    pcp_size: int
    dcp_size: int
    cached_tokens: int
    wire_version: int
    layout_fingerprint: bytes
    prompt_index: int
    choice_index: int
    prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., token: _Optional[bytes] = ..., engine_id: _Optional[str] = ..., generation: _Optional[int] = ..., host: _Optional[str] = ..., base_port: _Optional[int] = ..., tp_size: _Optional[int] = ..., pcp_size: _Optional[int] = ..., dcp_size: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., wire_version: _Optional[int] = ..., layout_fingerprint: _Optional[bytes] = ..., prompt_index: _Optional[int] = ..., choice_index: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("op_id", "advertise", "await_children", "cancel", "withdraw", "report_failure")
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    ADVERTISE_FIELD_NUMBER: _ClassVar[int]
    AWAIT_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    REPORT_FAILURE_FIELD_NUMBER: _ClassVar[int]
    op_id: int
    advertise: AdvertiseRequest
    await_children: AwaitRequest
    cancel: CancelRequest
    withdraw: WithdrawRequest
    report_failure: ReportFailureRequest
    def __init__(self, op_id: _Optional[int] = ..., advertise: _Optional[_Union[AdvertiseRequest, _Mapping]] = ..., await_children: _Optional[_Union[AwaitRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., withdraw: _Optional[_Union[WithdrawRequest, _Mapping]] = ..., report_failure: _Optional[_Union[ReportFailureRequest, _Mapping]] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("operations", "relaxed")
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    RELAXED_FIELD_NUMBER: _ClassVar[int]
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    relaxed: bool
    def __init__(self, operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ..., relaxed: bool = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("results", "events", "service_id", "operations_done")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_DONE_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[OperationResult]
    events: _containers.RepeatedCompositeFieldContainer[RendezvousEvent]
    service_id: str
    operations_done: int
    def __init__(self, results: _Optional[_Iterable[_Union[OperationResult, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[RendezvousEvent, _Mapping]]] = ..., service_id: _Optional[str] = ..., operations_done: _Optional[int] = ...) -> None: ...

class OperationResult(_message.Message):
    __slots__ = ("op_id", "code", "message", "retry_after_ms", "outcome")
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    op_id: int
    code: int
    message: str
    retry_after_ms: int
    outcome: Outcome
    def __init__(self, op_id: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ...) -> None: ...

class RendezvousEvent(_message.Message):
    __slots__ = ("rendezvous_id", "advertised", "child_ended", "complete", "closed")
    RENDEZVOUS_ID_FIELD_NUMBER: _ClassVar[int]
    ADVERTISED_FIELD_NUMBER: _ClassVar[int]
    CHILD_ENDED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    rendezvous_id: str
    advertised: Child
    child_ended: ChildEnded
    complete: RendezvousComplete
    closed: RendezvousClosed
    def __init__(self, rendezvous_id: _Optional[str] = ..., advertised: _Optional[_Union[Child, _Mapping]] = ..., child_ended: _Optional[_Union[ChildEnded, _Mapping]] = ..., complete: _Optional[_Union[RendezvousComplete, _Mapping]] = ..., closed: _Optional[_Union[RendezvousClosed, _Mapping]] = ...) -> None: ...

class ChildEnded(_message.Message):
    __slots__ = ("request_id", "outcome", "reason", "prompt_index", "choice_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outcome: Outcome
    reason: str
    prompt_index: int
    choice_index: int
    def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[str] = ..., prompt_index: _Optional[int] = ..., choice_index: _Optional[int] = ...) -> None: ...

class RendezvousComplete(_message.Message):
    __slots__ = ("live_children",)
    LIVE_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    live_children: int
    def __init__(self, live_children: _Optional[int] = ...) -> None: ...

class RendezvousClosed(_message.Message):
    __slots__ = ("outcome", "reason")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    reason: str
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class AdvertiseRequest(_message.Message):
    __slots__ = ("rendezvous_id", "child", "ttl_ms")
    RENDEZVOUS_ID_FIELD_NUMBER: _ClassVar[int]
    CHILD_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    rendezvous_id: str
    child: Child
    ttl_ms: int
    def __init__(self, rendezvous_id: _Optional[str] = ..., child: _Optional[_Union[Child, _Mapping]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class AdvertiseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AwaitRequest(_message.Message):
    __slots__ = ("rendezvous_id", "expected_children", "ttl_ms", "children_only")
    RENDEZVOUS_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_ONLY_FIELD_NUMBER: _ClassVar[int]
    rendezvous_id: str
    expected_children: int
    ttl_ms: int
    children_only: bool
    def __init__(self, rendezvous_id: _Optional[str] = ..., expected_children: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., children_only: bool = ...) -> None: ...

class AwaitResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[RendezvousEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[RendezvousEvent, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("rendezvous_id", "reason", "outcome")
    RENDEZVOUS_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    rendezvous_id: str
    reason: str
    outcome: Outcome
    def __init__(self, rendezvous_id: _Optional[str] = ..., reason: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("rendezvous_id", "request_id", "outcome", "reason", "prompt_index", "choice_index")
    RENDEZVOUS_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    rendezvous_id: str
    request_id: str
    outcome: Outcome
    reason: str
    prompt_index: int
    choice_index: int
    def __init__(self, rendezvous_id: _Optional[str] = ..., request_id: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[str] = ..., prompt_index: _Optional[int] = ..., choice_index: _Optional[int] = ...) -> None: ...

class WithdrawResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportFailureRequest(_message.Message):
    __slots__ = ("rendezvous_id", "request_ids", "reason")
    RENDEZVOUS_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rendezvous_id: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, rendezvous_id: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ReportFailureResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRendezvousStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRendezvousStatsResponse(_message.Message):
    __slots__ = ("open", "live_children", "remembered", "totals", "recent_failures", "service_id", "uptime_ms", "waiters", "exchange_streams")
    class TotalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    OPEN_FIELD_NUMBER: _ClassVar[int]
    LIVE_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    WAITERS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_STREAMS_FIELD_NUMBER: _ClassVar[int]
    open: int
    live_children: int
    remembered: int
    totals: _containers.ScalarMap[str, int]
    recent_failures: _containers.RepeatedCompositeFieldContainer[RecentFailure]
    service_id: str
    uptime_ms: int
    waiters: int
    exchange_streams: int
    def __init__(self, open: _Optional[int] = ..., live_children: _Optional[int] = ..., remembered: _Optional[int] = ..., totals: _Optional[_Mapping[str, int]] = ..., recent_failures: _Optional[_Iterable[_Union[RecentFailure, _Mapping]]] = ..., service_id: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., waiters: _Optional[int] = ..., exchange_streams: _Optional[int] = ...) -> None: ...

class RecentFailure(_message.Message):
    __slots__ = ("rendezvous_id", "request_id", "reason", "age_ms")
    RENDEZVOUS_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    rendezvous_id: str
    request_id: str
    reason: str
    age_ms: int
    def __init__(self, rendezvous_id: _Optional[str] = ..., request_id: _Optional[str] = ..., reason: _Optional[str] = ..., age_ms: _Optional[int] = ...) -> None: ...
