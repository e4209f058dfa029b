"""Everything that differs between vLLM versions 0.26 and 0.32, in one place, and vLLM values as plain ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base

HAS_TRANSFER_RESULTS = hasattr(connector_base, "KVConnectorTransferResults")
"""vLLM >= 0.32 takes failed requests; before that, failed block ids of a single cache group."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One scheduled request of a step. ``block_ids`` are appended to its table, or replace it when ``fresh``."""

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: Sequence[Sequence[int]] | None
    fresh: bool
    prompt_tokens: int | None = None
    """Prompt length, for a request that is scheduled for the first time."""


@dataclass(slots=True)
class BlockTables:
    """Block ids per cache group of every request that vLLM has scheduled and not finished."""

    _tables: dict[str, tuple[list[int], ...]] = field(default_factory=dict)

    def update(self, request: ScheduledRequest) -> tuple[list[int], ...]:
        """Take in a scheduled request; returns its whole table."""
        if request.fresh and request.block_ids is not None:
            self._tables[request.request_id] = tuple(list(ids) for ids in request.block_ids)
        elif request.block_ids is not None:
            for table, ids in zip(self._tables[request.request_id], request.block_ids, strict=True):
                table.extend(ids)
        return self._tables[request.request_id]

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are finished."""
        for request_id in request_ids:
            self._tables.pop(request_id, None)


def scheduled_requests(output: Any) -> list[ScheduledRequest]:
    """The scheduled requests of a vLLM ``SchedulerOutput``."""
    counts = output.num_scheduled_tokens
    requests = [
        ScheduledRequest(
            new.req_id, new.num_computed_tokens, counts[new.req_id], new.block_ids, True, _prompt_tokens(new)
        )
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    # 0.26 marks resumed requests by a parallel list, later versions by a set of ids.
    resumed_ids = getattr(cached, "resumed_req_ids", None)
    for index, request_id in enumerate(cached.req_ids):
        if resumed_ids is not None:
            resumed = request_id in resumed_ids
        else:
            resumed = cached.resumed_from_preemption[index]
        requests.append(
            ScheduledRequest(
                request_id,
                cached.num_computed_tokens[index],
                counts[request_id],
                cached.new_block_ids[index],
                resumed,
            )
        )
    return requests


def _prompt_tokens(new: Any) -> int:
    if new.prompt_token_ids is not None:
        return len(new.prompt_token_ids)
    return 0 if new.prompt_embeds is None else int(new.prompt_embeds.shape[0])


def ended_in_error(request: Any) -> bool:
    """Whether vLLM itself ended a finished request as an error, e.g. because its load failed."""
    return getattr(getattr(request, "status", None), "name", "") == "FINISHED_ERROR"


def transfer_results(received: set[str], failed: set[str]) -> Any:
    """vLLM's own result object (>= 0.32)."""
    return connector_base.KVConnectorTransferResults(
        finished_sending=set(), finished_recving=received, failed_recving=failed
    )


def blocks_without_load(blocks: Any) -> Any:
    """What a composite shows to a member that has nothing to load: real blocks since 0.32, none before."""
    return blocks if HAS_TRANSFER_RESULTS else blocks.new_empty()


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Parallel layout of an engine."""

    tp_size: int
    dp_size: int
    dp_rank: int
    pp_size: int
    cp_size: int


def parallel_sizes(vllm_config: Any) -> ParallelSizes:
    """Sizes from vLLM's parallel config; the data-parallel rank is the global one."""
    parallel = vllm_config.parallel_config
    dp_rank = getattr(parallel, "data_parallel_index", None)
    if dp_rank is None:
        dp_rank = parallel.data_parallel_rank
    return ParallelSizes(
        parallel.tensor_parallel_size,
        parallel.data_parallel_size,
        dp_rank,
        parallel.pipeline_parallel_size,
        getattr(parallel, "prefill_context_parallel_size", 1) * getattr(parallel, "decode_context_parallel_size", 1),
    )


def served_model(vllm_config: Any) -> str:
    """Name under which the model is served."""
    name = vllm_config.model_config.served_model_name or vllm_config.model_config.model
    return name if isinstance(name, str) else str(name[0])


def own_host() -> str:
    """vLLM's idea of this host's address."""
    from vllm.utils.network_utils import get_ip

    host: str = get_ip()
    return host


def tp_rank() -> int:
    """This worker's tensor-parallel rank."""
    from vllm.distributed import get_tensor_model_parallel_rank

    rank: int = get_tensor_model_parallel_rank()
    return rank


def broadcast_from_rank0(value: Any) -> Any:
    """Rank 0's value on every tensor-parallel rank; called once, at start-up, by all ranks."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return value if group.world_size == 1 else group.broadcast_object(value, src=0)
