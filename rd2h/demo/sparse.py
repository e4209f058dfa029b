"""`rd2h demo --sparse`: a sparse-attention model whose Decode engine keeps main KV in a host pool."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rd2h.demo.cases import Case, control_cases, equality_cases
from rd2h.demo.chain import Chain, ConnectedEngine
from rd2h.demo.completions import complete
from rd2h.demo.counters import Counters, PromptCounters
from rd2h.demo.driver import differing_text, tokens_text
from rd2h.demo.launcher import Launcher
from rd2h.demo.model import default_cache_dir
from rd2h.demo.process import ManagedProcess
from rd2h.demo.verdict import Verdict
from rd2h.errors import Rd2hError
from rd2h.reference.launch import BLOCK_TOKENS, ENGINE_ARGS, ENGINE_ENV, offload_args
from rd2h.reference.weights import SparseShape, sparse_model_dir

CHUNK_TOKENS = 256
BUFFER_FACTOR = 4
MAX_SEQS = 16

Printer = Callable[[str], None]


@dataclass(frozen=True)
class OffloadCounters:
    """What a Decode engine's offload manager has counted, and the tokens the engine has generated."""

    hits: int
    misses: int
    evictions: int
    h2d_bytes: int
    d2h_bytes: int
    generated: int

    @classmethod
    def read(cls, url: str) -> "OffloadCounters":
        """Reads a Decode engine's metrics page."""
        page = Counters.read(url)

        def total(name: str) -> int:
            return int(page.total_so_far(f"rd2h_offload_{name}_total"))

        return cls(
            hits=total("hits"),
            misses=total("misses"),
            evictions=total("evictions"),
            h2d_bytes=total("h2d_bytes"),
            d2h_bytes=total("d2h_bytes"),
            generated=int(page.total("vllm:generation_tokens_total")),
        )

    def __sub__(self, earlier: "OffloadCounters") -> "OffloadCounters":
        return OffloadCounters(
            self.hits - earlier.hits,
            self.misses - earlier.misses,
            self.evictions - earlier.evictions,
            self.h2d_bytes - earlier.h2d_bytes,
            self.d2h_bytes - earlier.d2h_bytes,
            self.generated - earlier.generated,
        )

    @property
    def hit_rate(self) -> float:
        """Part of the selected tokens that were in the hot buffer already."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def bytes_per_token(self) -> int:
        """Bytes between host pool and device, both ways, for one generated token."""
        return (self.h2d_bytes + self.d2h_bytes) // max(1, self.generated)


@dataclass(frozen=True)
class Memory:
    """Where main KV of a Decode engine lies, in bytes."""

    blocks: int
    blocks_without: int
    pool_bytes: int
    hot_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Device bytes that the same blocks would need for main KV, less the hot buffers."""
        return self.pool_bytes - self.hot_bytes

    @classmethod
    def of(cls, shape: SparseShape, offloading: ConnectedEngine, ordinary: ManagedProcess) -> "Memory":
        """From the number of blocks that both engines report; they were given the same device memory."""
        blocks = block_count(offloading.url)
        rows = min(CHUNK_TOKENS, MAX_SEQS)
        hot = rows * BUFFER_FACTOR * shape.index_topk * shape.main_bytes_per_token
        return cls(blocks, block_count(ordinary.url), blocks * BLOCK_TOKENS * shape.main_bytes_per_token, hot)


def block_count(url: str) -> int:
    """KV blocks of an engine."""
    for sample in Counters.read(url).labelled("vllm:cache_config_info"):
        if sample.get("num_gpu_blocks", "").isdecimal():
            return int(sample["num_gpu_blocks"])
    raise Rd2hError(f"{url}/metrics does not say how many KV blocks the engine has")


@dataclass
class SparseParts:
    """The running chain and what it is compared with."""

    single: ManagedProcess
    prefill: ConnectedEngine
    decode: ConnectedEngine
    suppressed: ConnectedEngine
    proxy: ManagedProcess
    control_proxy: ManagedProcess


class SparseDemo:
    """One run. `say` prints a line."""

    def __init__(self, log_dir: Path, prompt: str, say: Printer) -> None:
        self._log_dir, self._prompt, self._say = log_dir, prompt, say
        self._shape = SparseShape()
        self._start_s = time.monotonic()
        self.verdict = Verdict()

    def run(self) -> Verdict:
        """Starts everything, checks everything, stops everything. Raises Rd2hError when a part does not start."""
        shape = self._shape
        model = sparse_model_dir(shape, default_cache_dir())
        self._progress(
            f"reference model (CPU, not for production): {shape.layers} sparse MLA layers, {shape.indexer_layers} with "
            f"an indexer, top-k {shape.index_topk}, random weights, in {model}"
        )
        with Launcher(self._log_dir, self._progress) as launcher:
            parts = self._start(Chain(launcher, model, CHUNK_TOKENS, engine_args=ENGINE_ARGS, engine_env=ENGINE_ENV))
            self._memory(parts)
            self._compare(parts)
            self._control(parts)
            self._progress("stopping everything")
        self._say("")
        for line in self.verdict.lines():
            self._say(line)
        return self.verdict

    def _progress(self, text: str) -> None:
        self._say(f"[{time.monotonic() - self._start_s:6.1f} s] {text}")

    def _start(self, chain: Chain) -> SparseParts:
        meta = chain.start_meta()
        offload = {
            "extra_args": offload_args(BUFFER_FACTOR * self._shape.index_topk),
            "max_num_seqs": MAX_SEQS,
        }
        single = chain.start_single()
        prefill = chain.start_prefill(meta)
        decode = chain.start_decode(meta, changes=offload)
        suppressed = chain.start_decode(
            meta, "decode-without-reads", extra={"debug_suppress_reads": True}, changes=offload
        )
        engines = [single, prefill.process, decode.process, suppressed.process]
        self._progress("engines start: " + ", ".join(engine.name for engine in engines))
        chain.launcher.wait_engines(engines)
        proxy = chain.start_proxy(meta, prefill.process, decode.process)
        control_proxy = chain.start_proxy(meta, prefill.process, suppressed.process, "control-proxy")
        return SparseParts(single, prefill, decode, suppressed, proxy, control_proxy)

    def _memory(self, parts: SparseParts) -> None:
        memory = Memory.of(self._shape, parts.decode, parts.single)
        self._say("\nMemory of Decode, with the device memory that the ordinary engine has:")
        self._say(f"  KV blocks of {BLOCK_TOKENS} tokens     {memory.blocks:>12,}  ({memory.blocks_without:,} without)")
        self._say(f"  host pool                  {memory.pool_bytes:>12,} bytes, reserved and filled as it is used")
        self._say(f"  hot buffers on the device  {memory.hot_bytes:>12,} bytes, whatever the prompts' lengths")
        self._say(f"  device bytes saved         {memory.saved_bytes:>12,} bytes")
        more = memory.blocks > memory.blocks_without
        self.verdict.add("more blocks", more, f"{memory.blocks} with offload, {memory.blocks_without} without")

    def _cases(self) -> list[Case]:
        long_answer = replace(equality_cases(CHUNK_TOKENS)[3], name="the same, 200 tokens answered", max_tokens=200)
        return [Case("your prompt", (self._prompt,), max_tokens=48), *equality_cases(CHUNK_TOKENS), long_answer]

    def _compare(self, parts: SparseParts) -> None:
        """Compares every case with the single engine, and counts what moved between host pool and device."""
        whole = self._shape.index_topk * self._shape.main_bytes_per_token
        self._say("\nThe same prompts through the chain and on one engine; bytes are those between pool and device for")
        self._say(f"one generated token (top-k without a hot buffer: {whole:,}):")
        start = OffloadCounters.read(parts.decode.url)
        for case in self._cases():
            before, prompts = OffloadCounters.read(parts.decode.url), PromptCounters.read(parts.decode.url)
            expected = complete(parts.single.url, case.body())
            got = complete(parts.proxy.url, case.body())
            counted = OffloadCounters.read(parts.decode.url) - before
            pulled = PromptCounters.read(parts.decode.url) - prompts
            equal = expected == got
            self.verdict.add(f"{case.name}: tokens", equal, differing_text(expected, got))
            self._check_pulled(case, pulled)
            self._say(
                f"  {case.name:<32} {tokens_text(equal)}; pulled {pulled.pulled_bytes:>9,} bytes into pool and "
                f"indexer; hits {counted.hit_rate:4.0%}; {counted.bytes_per_token:>8,} bytes a token"
            )
        total = OffloadCounters.read(parts.decode.url) - start
        self._say(
            f"  {'all':<32} hits {total.hit_rate:.1%} of {total.hits + total.misses:,} selected tokens, "
            f"{total.evictions:,} evictions, {total.bytes_per_token:,} bytes a token"
        )
        self._say("  (random weights select nearly anew for every token of a long prompt)")
        self.verdict.add("hot buffer used", total.hits > 0 and total.misses > 0, f"{total}")

    def _check_pulled(self, case: Case, counted: PromptCounters) -> None:
        fresh_blocks = case.prompt_blocks(BLOCK_TOKENS) - counted.cached_tokens // BLOCK_TOKENS
        token_bytes = self._shape.main_bytes_per_token + self._shape.indexer_bytes_per_token
        wanted = fresh_blocks * BLOCK_TOKENS * token_bytes
        detail = f"pulled {counted.pulled_bytes:,} bytes, expected {wanted:,}"
        self.verdict.add(f"{case.name}: pulled bytes", counted.pulled_bytes == wanted, detail)

    def _control(self, parts: SparseParts) -> None:
        """The same comparison with a Decode engine that acknowledges layers without reading them."""
        self._say("\nNegative control, a Decode engine that acknowledges every layer but reads nothing:")
        for case in control_cases(CHUNK_TOKENS):
            differ = complete(parts.single.url, case.body()) != complete(parts.control_proxy.url, case.body())
            self.verdict.add(f"{case.name}: differs", differ, "the tokens are equal although nothing was read")
            self._say(f"  {case.name:<32} {tokens_text(not differ)}")
