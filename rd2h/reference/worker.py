"""``--worker-cls rd2h.reference.worker.ReferenceWorker``: a CPU worker that runs the reference model."""

import logging

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from rd2h.errors import ConfigError
from rd2h.reference.offloading import budget_of, settings_of
from rd2h.reference.runner import ReferenceModelRunner

logger = logging.getLogger(__name__)


class ReferenceWorker(CPUWorker):
    """vLLM's CPU worker with the reference model runner."""

    def init_device(self) -> None:
        """Set up the process, then replace the runner. Raises ConfigError under vLLM's second runner generation."""
        settings_of(self.vllm_config, model_runner_v2=self.use_v2_model_runner)
        if self.use_v2_model_runner:
            raise ConfigError("the reference worker needs VLLM_USE_V2_MODEL_RUNNER=0", key="VLLM_USE_V2_MODEL_RUNNER")
        super().init_device()
        self.model_runner = ReferenceModelRunner(self.vllm_config, torch.device("cpu"))

    def determine_available_memory(self) -> int:
        """Memory that vLLM may divide into blocks: with offload, the host's part is added to the device's.

        Raises ConfigError when the host pool would be larger than allowed.
        """
        available: int = super().determine_available_memory()
        offload = self.model_runner.offload
        if not offload.enabled:
            return available
        budget = budget_of(offload, self.vllm_config, self.model_runner.get_kv_cache_spec(), available)
        logger.info(
            "rd2h: %d blocks: %d bytes of device memory for indexers, %d bytes of host memory for main KV",
            budget.num_blocks,
            budget.device_bytes,
            budget.host_bytes,
        )
        return budget.total_bytes

    def shutdown(self) -> None:
        """Stop what writes into the pool (the connector), then give the pool back."""
        manager = self.model_runner.manager if isinstance(self.model_runner, ReferenceModelRunner) else None
        super().shutdown()
        if manager is not None:
            manager.close()
