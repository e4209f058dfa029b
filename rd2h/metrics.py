"""The data path's counters as vLLM connector statistics: in its log and under ``/metrics``."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from rd2h.children import FailureKind
from rd2h.stats import FAILURES, FIELDS, failures_of

GAUGES = {
    "children_pulling": "children whose KV is being pulled now",
    "connections_parked": "Prefill connections whose next message waits for its destination now",
    "reads_in_flight": "engine reads running now",
    "messages_unacknowledged": "ready messages that Decode has not acknowledged yet",
    "offload_pool_bytes": "size of the host pool that holds main KV of sparse offload",
    "offload_pool_touched_bytes": "bytes of the host pool that memory has been given for",
    "offload_hot_bytes": "device bytes of the hot buffers of one worker",
}
METRIC_NAMES = {"bytes_read": "rd2h_pulled_bytes"}


def metric_name(name: str) -> str:
    """Prometheus name of a counter (without the ``_total`` that every counter gets) or gauge."""
    return METRIC_NAMES.get(name, f"rd2h_{name}")


class Rd2hStats(KVConnectorStats):
    """``data``: counters by the names of ``rd2h.stats.FIELDS``, gauges by those of ``GAUGES``."""

    def reset(self) -> None:
        """Start afresh."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Sum over workers and steps; gauges keep the latest value of each aggregation."""
        for name, value in other.data.items():
            if name in GAUGES:
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of the log."""
        return {name: round(value, 6) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class Rd2hPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of every engine of a server; all exist from the start, so that a rate has a beginning."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            name: self._counter_cls(name=metric_name(name), documentation=text, labelnames=labelnames)
            for name, text in FIELDS.items()
            if name != FAILURES
        }
        failures = self._counter_cls(
            name=metric_name(FAILURES), documentation=FIELDS[FAILURES], labelnames=[*labelnames, "reason"]
        )
        gauges = {
            name: self._gauge_cls(
                name=metric_name(name), documentation=text, multiprocess_mode="mostrecent", labelnames=labelnames
            )
            for name, text in GAUGES.items()
        }
        self._counters = {
            engine: {name: counter.labels(*values) for name, counter in counters.items()}
            | {failures_of(kind): failures.labels(*values, kind.value) for kind in FailureKind}
            for engine, values in per_engine_labelvalues.items()
        }
        self._gauges = {
            engine: {name: gauge.labels(*values) for name, gauge in gauges.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counters."""
        counters, gauges = self._counters[engine_idx], self._gauges[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in counters:
                counters[name].inc(value)
            elif name in gauges:
                gauges[name].set(value)
