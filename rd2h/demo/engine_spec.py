"""What a vLLM engine of the demo is: its role, its connector configuration, and the command line that follows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rd2h.demo.ports import LOOPBACK

KvRole = Literal["kv_producer", "kv_consumer"]
SERVED_NAME = "tiny-mla"
MIB = 1024 * 1024

# The CPU rotary kernel is wrong for queries with more than one head, as MLA has them: prefill and decode of one engine
# would disagree. Everything else uses the custom kernels.
_COMPILATION = {"custom_ops": ["all", "-rotary_embedding"]}


@dataclass(frozen=True)
class EngineSpec:
    """One engine. Without a role it is an ordinary engine without a connector."""

    name: str
    model_dir: Path
    role: KvRole | None = None
    # kv_connector_extra_config.
    kv_extra: Mapping[str, object] = field(default_factory=dict)
    # First connector port of a kv_consumer.
    kv_port: int | None = None
    kv_connector: str = "SfaRemoteD2HConnector"
    kv_connector_module: str | None = "rd2h.connector"
    # More keys of --kv-transfer-config, such as kv_load_failure_policy.
    kv_config: Mapping[str, object] = field(default_factory=dict)
    tp_size: int = 1
    kv_cache_bytes: int = 96 * MIB
    max_model_len: int = 4096
    # Longer prompts are prefilled in chunks of this many tokens.
    max_batched_tokens: int = 256
    max_num_seqs: int = 32
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def kv_transfer_config(self) -> dict[str, object] | None:
        """The value of --kv-transfer-config, or None for an ordinary engine."""
        if self.role is None:
            return None
        config: dict[str, object] = {"kv_connector": self.kv_connector, "kv_role": self.role, "engine_id": self.name}
        if self.kv_connector_module is not None:
            config["kv_connector_module_path"] = self.kv_connector_module
        if self.kv_port is not None:
            config["kv_port"] = self.kv_port
        config["kv_connector_extra_config"] = dict(self.kv_extra)
        return {**config, **self.kv_config}

    def arguments(self, port: int) -> list[str]:
        """Arguments of `vllm serve`: eager, a fixed small KV cache, chunked prefill and prefix caching on."""
        arguments = [
            str(self.model_dir),
            *("--served-model-name", SERVED_NAME),
            *("--host", LOOPBACK),
            *("--port", str(port)),
            *("--dtype", "float32"),
            *("--attention-backend", "CPU_MLA"),
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-batched-tokens", str(self.max_batched_tokens)),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--kv-cache-memory-bytes", str(self.kv_cache_bytes)),
            *("--tensor-parallel-size", str(self.tp_size)),
            *("--compilation-config", json.dumps(_COMPILATION)),
            "--enforce-eager",
            "--enable-chunked-prefill",
            "--enable-prefix-caching",
            "--enable-request-id-headers",
            *("--seed", "0"),
            "--disable-uvicorn-access-log",
        ]
        config = self.kv_transfer_config()
        if config is not None:
            arguments += ["--kv-transfer-config", json.dumps(config)]
        return [*arguments, *self.extra_args]

    def environment(self, cache_root: Path) -> dict[str, str]:
        """Environment of the engine's processes; `cache_root` is where vLLM keeps its caches."""
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # With a connector the automatic binding reserves cores, and two engines of one machine starve each other.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_CACHE_ROOT": str(cache_root),
            # Else it is in the folder for temporary files, which lasts as long as the run.
            "TORCHINDUCTOR_CACHE_DIR": str(cache_root / "torchinductor"),
            # Adds /reset_prefix_cache.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            **self.env,
        }
