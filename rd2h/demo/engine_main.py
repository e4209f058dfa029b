"""Runs one OpenAI server of vLLM in this process: `python -m rd2h.demo.engine_main ARGUMENTS OF vllm serve...`."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence

from rd2h.demo.cpu_tuning import tune
from rd2h.demo.lifetime import forked_children_die_too
from rd2h.demo.vllm_cpu import answer_metadata_lookup

# What an engine imports on its way up; a fork server imports it once for all.
PRELOAD = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.collect_env",
    "vllm.entrypoints.cli.download_kernels",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.preload",
    "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.snapshot",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.mla.cpu_mla",
    "vllm.v1.attention.backends.mla.prefill.cpu_sdpa",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.model_loader.default_loader",
    "transformers.models.deepseek_v2",
    "uvicorn.protocols.http.httptools_impl",
    "rd2h.connector",
)


def prepare() -> None:
    """Makes the wheel usable and tunes it; run before anything imports vLLM."""
    answer_metadata_lookup()
    tune()


def preload() -> list[str]:
    """Imports what engines need and returns the names that this installation does not have."""
    absent = []
    for name in PRELOAD:
        if importlib.util.find_spec(name) is None:
            absent.append(name)
        else:
            importlib.import_module(name)
    return absent


def serve(arguments: Sequence[str]) -> None:
    """Runs `vllm serve ARGUMENTS` until it is told to stop; processes that it forks die with it."""
    forked_children_die_too()
    sys.argv = ["vllm", "serve", *arguments]
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    prepare()
    serve(sys.argv[1:])
