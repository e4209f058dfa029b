"""``SfaRemoteD2HConnector``: the vLLM KV connector. It only hands vLLM's calls to the halves that do the work.

One object serves one role: the scheduler's half or a worker's half, of a Prefill (``kv_producer``) or a Decode
(``kv_consumer``) engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from rd2h import assembly, vllm_compat
from rd2h.assembly import EngineFacts, Handshake
from rd2h.config import ConnectorConfig
from rd2h.errors import Rd2hError, StateError
from rd2h.load import BlockPool, LoadMeter
from rd2h.metrics import Rd2hPromMetrics, Rd2hStats
from rd2h.steps import ChildFailure, DecodeStep, PrefillStep

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

IDLE_STEP_S = 0.02
"""Pause of steps without requests; one that comes then waits so long at most."""


class StepMetadata(KVConnectorMetadata):
    """One engine step, scheduler to workers."""

    def __init__(self, step: PrefillStep | DecodeStep) -> None:
        self.step = step
        self.writes_awaited = False


class WorkerReport(KVConnectorWorkerMetadata):
    """What workers tell their scheduler half; ``reasons``: why requests failed on Decode, by request id.

    A Prefill worker reports in every step in which it is ``contacting``, and in the first in which it is not any more.
    """

    def __init__(
        self,
        failures: list[ChildFailure],
        unhealthy: str = "",
        reasons: Mapping[str, str] | None = None,
        contacting: bool = False,
    ) -> None:
        self.failures = failures
        self.unhealthy = unhealthy
        self.reasons = dict(reasons or {})
        self.contacting = contacting

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the reports of two workers."""
        if isinstance(other, WorkerReport):
            self.failures += other.failures
            self.unhealthy = self.unhealthy or other.unhealthy
            self.reasons = {**other.reasons, **self.reasons}
            self.contacting = self.contacting or other.contacting
        return self


class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """What a worker knows after registration, for the scheduler half."""

    def __init__(self, handshake: Handshake) -> None:
        self.handshake = handshake


class SfaRemoteD2HConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        try:
            self._facts = EngineFacts.of(vllm_config, kv_cache_config)
        except Rd2hError as error:
            logger.error("rd2h: the engine cannot start: %s", error)
            raise
        self._producer = self._facts.producer
        self._is_worker = role is KVConnectorRole.WORKER
        self._load = LoadMeter(self._facts.groups.block_size_tokens, len(kv_cache_config.kv_cache_groups))
        self._told_contacting = False
        self._beside_loaders = False
        self._asked = ("", 0)
        """The request that vLLM asked about last, and the tokens that it has here."""
        self._prefill_scheduler: assembly.PrefillSchedulerSide | None = None
        self._decode_scheduler: assembly.DecodeSchedulerSide | None = None
        self._prefill_worker: assembly.PrefillWorkerSide | None = None
        self._decode_worker: assembly.DecodeWorkerSide | None = None

    # --- what composites and layer-wise offload ask for ---

    @property
    def supports_layerwise_buffer_reuse(self) -> bool:
        """A Prefill worker can say when a layer's physical buffers may be overwritten."""
        return self._producer and self._is_worker

    @property
    def requires_full_blocks_on_update_after_alloc(self) -> bool:
        """A Prefill scheduler half must see every block, whichever connector was chosen for the lookup."""
        return self._producer and not self._is_worker

    def wait_for_layer_send(self, layer_idx: int) -> None:
        """Block until every Decode that was told of this layer's physical buffers has read them."""
        if self._prefill_worker is not None:
            self._prefill_worker.worker.wait_layer(layer_idx)

    wait_for_layer_reuse = wait_for_layer_send

    def expect_load_results(self) -> None:
        """A composite with other members says, before anything else, that ``note_load_results`` ends every step."""
        self._beside_loaders = self._producer

    def note_load_results(self, block_ids: set[int]) -> None:
        """Prefill: the blocks that no member could load in this step; before this no prompt is told to be complete."""
        if self._prefill_worker is not None:
            self._prefill_worker.worker.loads_known(block_ids)

    # --- scheduler half ---

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Workers have registered their caches: now peers may know this engine."""
        handshakes = {rank: item.handshake for rank, item in metadata.items() if isinstance(item, HandshakeMetadata)}
        if self._producer:
            self._prefill_scheduler = assembly.prefill_scheduler(
                self._facts, handshakes, self._load, self._beside_loaders
            )
        else:
            self._decode_scheduler = assembly.decode_scheduler(self._facts, handshakes, self._load)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """vLLM's pool, whose free blocks are reported to the meta service. Not called before vLLM 0.32."""
        self._load.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Decode: the rest of the prompt comes asynchronously. Prefill: None leaves a request in vLLM's queue."""
        self._asked = (request.request_id, num_computed_tokens)
        if self._prefill_scheduler is not None and _asks_for(request, "do_remote_decode"):
            ready = self._prefill_scheduler.half.ready(request.request_id, _params(request))
            return 0 if ready else None, False
        if self._producer or not _asks_for(request, "do_remote_prefill"):
            return 0, False
        remaining = self._decode().half.remaining_tokens(request.num_prompt_tokens, num_computed_tokens)
        return remaining, remaining > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Prefill: note whom the request feeds, and what another connector loads for it. Decode: advertise it."""
        if self._producer:
            if num_external_tokens > 0:
                asked, computed = self._asked
                first = computed if asked == request.request_id else 0
                self._prefill().half.loads(blocks.get_block_ids(), first, num_external_tokens)
            if _asks_for(request, "do_remote_decode"):
                self._prefill().half.track(request.request_id, _params(request), request.num_prompt_tokens)
        elif _asks_for(request, "do_remote_prefill") and num_external_tokens > 0:
            # Choices of one request may share the object; clearing the flag is for this one only.
            request.kv_transfer_params = dict(_params(request))
            self._decode().half.allocated(
                request.request_id,
                request.kv_transfer_params,
                blocks.get_block_ids(),
                request.num_prompt_tokens,
                num_external_tokens,
            )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Metadata of this step."""
        scheduled = vllm_compat.scheduled_requests(scheduler_output)
        self._load.scheduled(scheduler_output.num_scheduled_tokens)
        if self._producer:
            if not scheduled and self.has_pending_push_work():
                # vLLM would step an engine that has nothing else to do a thousand times a second, with all its workers.
                time.sleep(IDLE_STEP_S)
            finished = list(scheduler_output.finished_req_ids)
            return StepMetadata(self._prefill().half.step(scheduled, finished))
        return StepMetadata(self._decode().half.step(scheduled))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the freeing of blocks: gates and fences protect what is still being read."""
        params = _params(request)
        error = vllm_compat.ended_in_error(request)
        self._load.finished(request.request_id)
        if self._producer:
            self._prefill().half.finished(request.request_id, params, error=error)
        else:
            self._decode().half.finished(request.request_id, params, error=error)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``, for any number of cache groups."""
        return self.request_finished(request, [])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers reported in a step."""
        report = connector_output.kv_connector_worker_meta
        if self._prefill_scheduler is not None and isinstance(report, WorkerReport):
            self._prefill_scheduler.note_workers(report.failures, report.unhealthy, report.contacting)
        if self._decode_scheduler is not None:
            if isinstance(report, WorkerReport):
                self._decode_scheduler.note_workers(report.reasons, report.unhealthy)
            self._decode_scheduler.half.received(
                list(connector_output.finished_recving or ()), list(connector_output.failed_recving or ())
            )

    def has_pending_push_work(self) -> bool:
        """Prefill: keep an idle engine stepping while a failure may come that only its workers can tell of.

        Such an engine steps every ``IDLE_STEP_S``. That lasts until every new Decode has answered, at most the
        connect and handshake timeouts; later failures Decode knows itself.
        """
        return self._prefill_scheduler is not None and self._prefill_scheduler.contacting

    # --- worker half ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Caches are allocated: start the transfer engine and the background threads."""
        if self._producer:
            self._prefill_worker = assembly.prefill_worker(self._facts, kv_caches, self._beside_loaders)
        else:
            self._decode_worker = assembly.decode_worker(self._facts, kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this worker tells the scheduler half."""
        side = self._prefill_worker or self._decode_worker
        return HandshakeMetadata(side.handshake) if side is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before anything of the step touches the caches: wait for readers of what will be overwritten."""
        self._await_writes(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take in the step, before the forward (``start_load_kv`` may come after it)."""
        super().bind_connector_metadata(connector_metadata)
        self._await_writes(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            step = connector_metadata.step
            if self._prefill_worker is not None and isinstance(step, PrefillStep):
                self._prefill_worker.worker.begin(step)
            elif self._decode_worker is not None and isinstance(step, DecodeStep):
                self._decode_worker.worker.begin(step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: pulls run by themselves."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Prefill with shared layer buffers: wait for their readers. Elsewhere nothing."""
        if self._prefill_worker is not None:
            self._prefill_worker.worker.before_layer(layer_name)

    def on_kv_cache_written(self, layer_name: str) -> None:
        """Prefill: a layer's KV has been scattered (runtimes that tell so before attention)."""
        if self._prefill_worker is not None and self.has_connector_metadata():
            self._prefill_worker.worker.layer_written(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Prefill: a layer is computed; publishes it unless that has been done."""
        if self._prefill_worker is not None:
            self._prefill_worker.worker.layer_written(layer_name)

    def wait_for_save(self) -> None:
        """Prefill: the forward is over. Never waits: gates protect the caches."""
        if self._prefill_worker is not None:
            self._prefill_worker.worker.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Decode: requests that have ended, each reported once (vLLM >= 0.32)."""
        if self._decode_worker is None:
            return vllm_compat.transfer_results(set(), set())
        results = self._decode_worker.worker.results()
        return vllm_compat.transfer_results(results.received, results.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Decode: requests that have ended (older vLLM); failed ones show by their blocks."""
        if self._decode_worker is None:
            return None, None
        return None, self._decode_worker.worker.results_with_invalid_blocks()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed requests, for a vLLM that does not take failed requests."""
        return self._decode_worker.worker.take_invalid_blocks() if self._decode_worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Prefill: children that could not be served. Decode: why requests failed."""
        if self._decode_worker is not None:
            reasons = self._decode_worker.worker.take_reasons()
            unhealthy = "" if self._decode_worker.worker.alive else "a thread of the puller is dead"
            return WorkerReport([], unhealthy, reasons) if reasons or unhealthy else None
        if self._prefill_worker is None:
            return None
        worker = self._prefill_worker.worker
        contacting = worker.contacting()
        failures = worker.take_failures()
        unhealthy = "" if worker.alive else "the publisher thread is dead"
        if not (failures or unhealthy or contacting or self._told_contacting):
            return None
        self._told_contacting = contacting
        return WorkerReport(failures, unhealthy, contacting=contacting)

    def shutdown(self) -> None:
        """End threads, connections and registrations."""
        for side in (self._prefill_worker, self._decode_worker, self._prefill_scheduler, self._decode_scheduler):
            if side is not None:
                side.close()

    # --- statistics ---

    def get_kv_connector_stats(self) -> Rd2hStats | None:
        """Counters since the last call."""
        side = self._prefill_worker or self._decode_worker or self._decode_scheduler
        values = side.take_stats() if side is not None else {}
        return Rd2hStats(values) if values else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Rd2hStats:
        """Statistics from their serialised form."""
        return Rd2hStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Rd2hPromMetrics:
        """Prometheus metrics of this connector."""
        return Rd2hPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer hooks must run between graph pieces; vLLM asks early, so bad settings are refused here already."""
        ConnectorConfig.parse(extra_config)
        return True

    # --- helpers ---

    def _await_writes(self, metadata: KVConnectorMetadata) -> None:
        if self._prefill_worker is None or not isinstance(metadata, StepMetadata) or metadata.writes_awaited:
            return
        metadata.writes_awaited = True
        if isinstance(metadata.step, PrefillStep):
            self._prefill_worker.worker.before_writes(metadata.step)

    def _prefill(self) -> assembly.PrefillSchedulerSide:
        if self._prefill_scheduler is None:
            raise StateError("the Prefill workers have not registered their KV caches yet")
        return self._prefill_scheduler

    def _decode(self) -> assembly.DecodeSchedulerSide:
        if self._decode_scheduler is None:
            raise StateError("the Decode workers have not registered their KV caches yet")
        return self._decode_scheduler


def _params(request: Request) -> dict[str, Any]:
    """A client's parameters; anything but a map counts as none."""
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


def _asks_for(request: Request, flag: str) -> bool:
    return _params(request).get(flag) is True
