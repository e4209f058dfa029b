"""vLLM connectors that record what reaches them."""

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class Note(KVConnectorMetadata):
    def __init__(self, text: str) -> None:
        self.text = text


class Greeting(KVConnectorHandshakeMetadata):
    def __init__(self, text: str) -> None:
        self.text = text


@dataclass
class Tally(KVConnectorWorkerMetadata):
    count: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Tally)
        return Tally(self.count + other.count)


class RecordingStats(KVConnectorStats):
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data["n"] = self.data.get("n", 0) + other.data.get("n", 0)
        return self

    def reset(self) -> None:
        self.data = {}

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class RecordingConnector(KVConnectorBase_V1, SupportsHMA):
    """Every call goes into ``calls``; what it answers is set from outside. ``log`` is shared by all members."""

    log: ClassVar[list[tuple[str, str, Any]]] = []

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.name = str(vllm_config.kv_transfer_config.kv_connector_extra_config.get("name", type(self).__name__))
        self.calls: list[tuple[str, Any]] = []
        self.matched: tuple[int | None, bool] = (0, False)
        self.answer: tuple[bool, dict[str, Any] | None] = (False, None)
        self.greeting: Greeting | None = None
        self.results = KVConnectorTransferResults()
        self.load_errors: set[int] = set()
        self.tally: Tally | None = None
        self.stats: RecordingStats | None = None
        self.reset_answer: bool | None = None
        self.events: list[Any] = []
        self.preempting: Any = None

    def note(self, what: str, value: Any = None) -> None:
        self.calls.append((what, value))
        self.log.append((self.name, what, value))

    def called(self, what: str) -> list[Any]:
        return [value for name, value in self.calls if name == what]

    # --- worker half ---

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.note("register", list(kv_caches))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.note("bind", getattr(connector_metadata, "text", None))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.note("preempt", getattr(kv_connector_metadata, "text", None))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.note("start_load")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.note("load", layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.note("save", layer_name)

    def wait_for_save(self) -> None:
        self.note("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self.results = self.results, KVConnectorTransferResults()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self.load_errors = self.load_errors, set()
        return errors

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.tally

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.greeting

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self.stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return RecordingStats(data or {})

    def shutdown(self) -> None:
        self.note("shutdown")

    # --- scheduler half ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.note("alloc", (blocks.get_block_ids(), num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Note(f"step of {self.name}")

    def update_connector_output(self, connector_output: Any) -> None:
        self.note("output", connector_output.kv_connector_worker_meta)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.note("handshake", {rank: getattr(item, "text", item) for rank, item in metadata.items()})

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.note("finished", block_ids)
        return self.answer

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.note("finished", block_ids)
        return self.answer

    def take_events(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def reset_cache(self) -> bool | None:
        self.note("reset_cache")
        return self.reset_answer


class LayerStore(RecordingConnector):
    """A layer-wise store that takes over the wait and asks before it writes into a layer's buffer."""

    takes_over = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.waiter: Any = None
        self.layer = 0

    def set_external_slot_release_waiter(self, waiter: Any) -> bool | None:
        if not self.takes_over:
            return False
        self.waiter = waiter
        return None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.layer = 0

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.note("load", layer_name)
        if self.waiter is not None:
            self.waiter(self.layer)
            self.note("writes", self.layer)
        self.layer += 1


class DecliningStore(LayerStore):
    """The same without the take-over."""

    takes_over = False


class PlainGroups(RecordingConnector):
    """Asks for full blocks whoever was chosen."""

    requires_full_blocks_on_update_after_alloc = True
