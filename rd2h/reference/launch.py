"""Command line and environment that make a vLLM engine one of the reference model."""

import json

BLOCK_TOKENS = 16
ENGINE_ARGS = (
    *("--worker-cls", "rd2h.reference.worker.ReferenceWorker"),
    *("--block-size", str(BLOCK_TOKENS)),
)
ENGINE_ENV = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def offload_args(topk_buffer_size: int, dram_gib: int = 1) -> tuple[str, ...]:
    """Arguments of a Decode engine that keeps main KV in a host pool of at most ``dram_gib`` GiB."""
    settings = {"enabled": True, "topk_buffer_size": topk_buffer_size, "dram_size_per_dp_GB": dram_gib}
    return ("--additional-config", json.dumps({"sparse_kv_offload_config": settings}))
