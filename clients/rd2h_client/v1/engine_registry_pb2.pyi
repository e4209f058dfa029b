from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_ROLE_UNSPECIFIED: _ClassVar[EngineRole]
    ENGINE_ROLE_PREFILL: _ClassVar[EngineRole]
    ENGINE_ROLE_DECODE: _ClassVar[EngineRole]

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_STARTING: _ClassVar[EngineState]
    ENGINE_STATE_SERVING: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
ENGINE_ROLE_UNSPECIFIED: EngineRole
ENGINE_ROLE_PREFILL: EngineRole
ENGINE_ROLE_DECODE: EngineRole
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_STARTING: EngineState
ENGINE_STATE_SERVING: EngineState
ENGINE_STATE_DRAINING: EngineState

class Engine(_message.Message):
    __slots__ = ("engine_id", "generation", "role", "host", "base_port", "tp_size", "dp_size", "dp_rank", "http_address", "state", "load", "layout", "health")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    BASE_PORT_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    generation: int
    role: EngineRole
    host: str
    base_port: int
    tp_size: int
    dp_size: int
    dp_rank: int
    http_address: str
    state: EngineState
    load: Load
    layout: Layout
    health: DataPathHealth
    def __init__(self, engine_id: _Optional[str] = ..., generation: _Optional[int] = ..., role: _Optional[_Union[EngineRole, str]] = ..., host: _Optional[str] = ..., base_port: _Optional[int] = ..., tp_size: _Optional[int] = ..., dp_size: _Optional[int] = ..., dp_rank: _Optional[int] = ..., http_address: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., health: _Optional[_Union[DataPathHealth, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "pulling_requests", "free_kv_tokens", "total_kv_tokens")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PULLING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    pulling_requests: int
    free_kv_tokens: int
    total_kv_tokens: int
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., pulling_requests: _Optional[int] = ..., free_kv_tokens: _Optional[int] = ..., total_kv_tokens: _Optional[int] = ...) -> None: ...

class DataPathHealth(_message.Message):
    __slots__ = ("ok", "reason")
    OK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    reason: str
    def __init__(self, ok: bool = ..., reason: _Optional[str] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("wire_version", "transfer_backend", "transfer_protocol", "model", "kv_dtype", "block_size_tokens", "layers", "fingerprint")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BACKEND_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    transfer_backend: str
    transfer_protocol: str
    model: str
    kv_dtype: str
    block_size_tokens: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerLayout]
    fingerprint: bytes
    def __init__(self, wire_version: _Optional[int] = ..., transfer_backend: _Optional[str] = ..., transfer_protocol: _Optional[str] = ..., model: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerLayout, _Mapping]]] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class LayerLayout(_message.Message):
    __slots__ = ("name", "main_block_bytes", "indexer_block_bytes", "scale_block_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAIN_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEXER_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCALE_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    main_block_bytes: _containers.RepeatedScalarFieldContainer[int]
    indexer_block_bytes: int
    scale_block_bytes: int
    def __init__(self, name: _Optional[str] = ..., main_block_bytes: _Optional[_Iterable[int]] = ..., indexer_block_bytes: _Optional[int] = ..., scale_block_bytes: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("engine", "requested_ttl_ms")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    engine: Engine
    requested_ttl_ms: int
    def __init__(self, engine: _Optional[_Union[Engine, _Mapping]] = ..., requested_ttl_ms: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("lease_id", "ttl_ms", "revision", "service_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    ttl_ms: int
    revision: int
    service_id: str
    def __init__(self, lease_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., revision: _Optional[int] = ..., service_id: _Optional[str] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("lease_id", "state", "load", "health")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    state: EngineState
    load: Load
    health: DataPathHealth
    def __init__(self, lease_id: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., health: _Optional[_Union[DataPathHealth, _Mapping]] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("ttl_ms",)
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: int
    def __init__(self, ttl_ms: _Optional[int] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnginesRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: EngineRole
    def __init__(self, role: _Optional[_Union[EngineRole, str]] = ...) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines", "revision", "service_id", "grace_remaining_ms", "leases")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    revision: int
    service_id: str
    grace_remaining_ms: int
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., revision: _Optional[int] = ..., service_id: _Optional[str] = ..., grace_remaining_ms: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("ttl_ms", "remaining_ms", "age_ms")
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: int
    remaining_ms: int
    age_ms: int
    def __init__(self, ttl_ms: _Optional[int] = ..., remaining_ms: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class WatchEnginesRequest(_message.Message):
    __slots__ = ("role", "after_revision", "service_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    AFTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    role: EngineRole
    after_revision: int
    service_id: str
    def __init__(self, role: _Optional[_Union[EngineRole, str]] = ..., after_revision: _Optional[int] = ..., service_id: _Optional[str] = ...) -> None: ...

class WatchEnginesResponse(_message.Message):
    __slots__ = ("events", "revision", "snapshot", "service_id", "grace_remaining_ms", "snapshot_continues")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_CONTINUES_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[EngineEvent]
    revision: int
    snapshot: bool
    service_id: str
    grace_remaining_ms: int
    snapshot_continues: bool
    def __init__(self, events: _Optional[_Iterable[_Union[EngineEvent, _Mapping]]] = ..., revision: _Optional[int] = ..., snapshot: bool = ..., service_id: _Optional[str] = ..., grace_remaining_ms: _Optional[int] = ..., snapshot_continues: bool = ...) -> None: ...

class EngineEvent(_message.Message):
    __slots__ = ("kind", "engine", "reason", "revision")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[EngineEvent.Kind]
        KIND_ADDED: _ClassVar[EngineEvent.Kind]
        KIND_UPDATED: _ClassVar[EngineEvent.Kind]
        KIND_REMOVED: _ClassVar[EngineEvent.Kind]
    KIND_UNSPECIFIED: EngineEvent.Kind
    KIND_ADDED: EngineEvent.Kind
    KIND_UPDATED: EngineEvent.Kind
    KIND_REMOVED: EngineEvent.Kind
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[EngineEvent.Reason]
        REASON_EXPIRED: _ClassVar[EngineEvent.Reason]
        REASON_DEREGISTERED: _ClassVar[EngineEvent.Reason]
        REASON_REPLACED: _ClassVar[EngineEvent.Reason]
    REASON_UNSPECIFIED: EngineEvent.Reason
    REASON_EXPIRED: EngineEvent.Reason
    REASON_DEREGISTERED: EngineEvent.Reason
    REASON_REPLACED: EngineEvent.Reason
    KIND_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    kind: EngineEvent.Kind
    engine: Engine
    reason: EngineEvent.Reason
    revision: int
    def __init__(self, kind: _Optional[_Union[EngineEvent.Kind, str]] = ..., engine: _Optional[_Union[Engine, _Mapping]] = ..., reason: _Optional[_Union[EngineEvent.Reason, str]] = ..., revision: _Optional[int] = ...) -> None: ...

class CheckCompatibilityRequest(_message.Message):
    __slots__ = ("prefill_engine_id", "decode_engine_id")
    PREFILL_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    prefill_engine_id: str
    decode_engine_id: str
    def __init__(self, prefill_engine_id: _Optional[str] = ..., decode_engine_id: _Optional[str] = ...) -> None: ...

class CheckCompatibilityResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
