"""Three adaptations of vLLM on a CPU, made in an engine's process before vLLM builds its configuration.

Only the demo and the tests use this: it makes small engines start in seconds and lets the reference MLA backend do
what production engines do. Nothing here touches what is computed.
"""

import functools
import os
from collections.abc import Callable
from typing import Any


def tune() -> None:
    """Applies the adaptations; a second call does nothing.

    - Chunked prefill and prefix caching stay as asked for. The CPU platform switches both off for its reference MLA
      backend although that backend computes them; the connector must be seen working with both.
    - Engine core and workers are forked from the process that has imported vLLM instead of importing it again (18 s).
    - The model class is inspected in this process; a process of its own protects only device initialisation.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config
    if getattr(original, "rd2h_tuned", False):
        return

    @functools.wraps(original)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunked, batched = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefix_caching = cache.enable_prefix_caching
        original(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked, batched
        cache.enable_prefix_caching = prefix_caching
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    check_and_update_config.rd2h_tuned = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    registry._run_in_subprocess = _run_here


def _run_here(job: Callable[[], Any]) -> Any:
    return job()
