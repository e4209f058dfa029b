"""``--worker-cls rd2h.reference.worker.ReferenceWorker``: a CPU worker that runs the reference model."""

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from rd2h.errors import ConfigError
from rd2h.reference.runner import ReferenceModelRunner


class ReferenceWorker(CPUWorker):
    """vLLM's CPU worker with the reference model runner."""

    def init_device(self) -> None:
        """Set up the process, then replace the runner. Raises ConfigError under vLLM's second runner generation."""
        if self.use_v2_model_runner:
            raise ConfigError("the reference worker needs VLLM_USE_V2_MODEL_RUNNER=0", key="VLLM_USE_V2_MODEL_RUNNER")
        super().init_device()
        self.model_runner = ReferenceModelRunner(self.vllm_config, torch.device("cpu"))
