"""Runs the demo: one streamed completion, a comparison token by token, a negative control, and a verdict."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rd2h.demo.cases import Case, control_cases, equality_cases
from rd2h.demo.chain import Chain, ConnectedEngine
from rd2h.demo.completions import Tokens, complete, stream
from rd2h.demo.counters import PromptCounters
from rd2h.demo.engine_spec import SERVED_NAME
from rd2h.demo.launcher import Launcher
from rd2h.demo.model import ModelShape, default_cache_dir, model_dir
from rd2h.demo.process import ManagedProcess
from rd2h.demo.timeline import Event, pulled_bytes, render
from rd2h.demo.verdict import Verdict

BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
STREAM_TOKENS = 48

Printer = Callable[[str], None]


@dataclass
class Parts:
    """The running chain and what it is compared with."""

    single: ManagedProcess
    prefill: ConnectedEngine
    decode: ConnectedEngine
    suppressed: ConnectedEngine
    proxy: ManagedProcess
    control_proxy: ManagedProcess


class Demo:
    """One run. `say` prints a line; `show` prints a piece of text without a line end."""

    def __init__(self, log_dir: Path, prompt: str, say: Printer, show: Printer) -> None:
        self._log_dir = log_dir
        self._prompt = prompt
        self._say = say
        self._show = show
        self._shape = ModelShape()
        self._start_s = time.monotonic()
        self.verdict = Verdict()

    def run(self) -> Verdict:
        """Starts everything, checks everything, stops everything. Raises Rd2hError when a part does not start."""
        model = model_dir(self._shape, default_cache_dir())
        self._progress(f"model: {self._shape.layers} MLA layers, random weights, in {model}")
        with Launcher(self._log_dir, self._progress) as launcher:
            parts = self._start(Chain(launcher, model, CHUNK_TOKENS))
            self._stream_one(parts)
            self._compare(parts)
            self._control(parts)
            self._progress("stopping everything")
        self._say("")
        for line in self.verdict.lines():
            self._say(line)
        return self.verdict

    def _progress(self, text: str) -> None:
        self._say(f"[{time.monotonic() - self._start_s:6.1f} s] {text}")

    def _start(self, chain: Chain) -> Parts:
        meta = chain.start_meta()
        self._progress(f"meta service listens on {meta.address}")
        single = chain.start_single()
        prefill = chain.start_prefill(meta)
        decode = chain.start_decode(meta)
        suppressed = chain.start_decode(meta, "decode-without-reads", extra={"debug_suppress_reads": True})
        engines = [single, prefill.process, decode.process, suppressed.process]
        self._progress("engines start: " + ", ".join(engine.name for engine in engines))
        chain.launcher.wait_engines(engines)
        proxy = chain.start_proxy(meta, prefill.process, decode.process)
        control_proxy = chain.start_proxy(meta, prefill.process, suppressed.process, "control-proxy")
        self._progress(f"proxy listens on {proxy.url}")
        return Parts(single, prefill, decode, suppressed, proxy, control_proxy)

    def _stream_one(self, parts: Parts) -> None:
        """Streams one completion and shows when what happened."""
        self._say(f"\nOne completion, streamed through the chain (random weights, so expect noise):\n  {self._prompt}")
        body = {"model": SERVED_NAME, "prompt": self._prompt, "max_tokens": STREAM_TOKENS, "temperature": 0}
        body["return_token_ids"] = True
        events = [Event(time.time(), "client", "request")]
        tokens: list[int] = []
        self._show("  ")
        for piece in stream(parts.proxy.url, body):
            if not tokens and piece.token_ids:
                events.append(Event(time.time(), "client", "first_token"))
            tokens += piece.token_ids
            self._show(piece.text)
        events.append(Event(time.time(), "client", "last_token"))
        self._say("\n\nTimeline:")
        for engine in (parts.prefill, parts.decode):
            events += engine.timeline.new_events()
        for line in render(events, events[0].t_s):
            self._say(line)
        expected = complete(parts.single.url, body)[0]
        self.verdict.add("streamed completion", tuple(tokens) == expected, differing_text(expected, tuple(tokens)))
        self._say(f"streamed completion: {tokens_text(tuple(tokens) == expected)}")

    def _compare(self, parts: Parts) -> None:
        """Compares every case with the single engine, and Decode's counters with what they must be."""
        self._say("\nThe same prompts through the chain and on one engine:")
        for case in equality_cases(CHUNK_TOKENS):
            before = PromptCounters.read(parts.decode.url)
            parts.decode.timeline.new_events()
            expected = complete(parts.single.url, case.body())
            got = complete(parts.proxy.url, case.body())
            counted = PromptCounters.read(parts.decode.url) - before
            self._judge(case, expected, got, counted, pulled_bytes(parts.decode.timeline.new_events()))

    def _judge(
        self, case: Case, expected: tuple[Tokens, ...], got: tuple[Tokens, ...], counted: PromptCounters, pulled: int
    ) -> None:
        equal = expected == got
        self.verdict.add(f"{case.name}: tokens", equal, differing_text(expected, got))
        one_each = counted.computed_tokens == case.children
        computed = f"Decode computed {counted.computed_tokens} prompt tokens for {case.children} requests"
        self.verdict.add(f"{case.name}: computed tokens", one_each, computed)
        fresh_blocks = case.prompt_blocks(BLOCK_TOKENS) - counted.cached_tokens // BLOCK_TOKENS
        block_bytes = BLOCK_TOKENS * self._shape.kv_bytes_per_token_layer
        wanted = fresh_blocks * block_bytes * self._shape.layers
        bytes_text = f"pulled {pulled:,} bytes, expected {wanted:,} ({fresh_blocks} blocks not cached on Decode)"
        self.verdict.add(f"{case.name}: pulled bytes", pulled == wanted, bytes_text)
        same = counted.pulled_bytes == pulled
        self.verdict.add(f"{case.name}: counter", same, f"counter {counted.pulled_bytes:,}, timeline {pulled:,}")
        self._say(f"  {case.name:<32} {tokens_text(equal)}; {computed}; {bytes_text}")

    def _control(self, parts: Parts) -> None:
        """The same comparison with a Decode engine that acknowledges layers without reading them."""
        self._say("\nNegative control, a Decode engine that acknowledges every layer but reads nothing:")
        for case in control_cases(CHUNK_TOKENS):
            expected = complete(parts.single.url, case.body())
            got = complete(parts.control_proxy.url, case.body())
            differ = expected != got
            self.verdict.add(f"{case.name}: differs", differ, "the tokens are equal although nothing was read")
            self._say(f"  {case.name:<32} {tokens_text(not differ)}")


def tokens_text(equal: bool) -> str:
    """How the demo says it."""
    return "tokens equal" if equal else "tokens differ"


def differing_text(expected: object, got: object) -> str:
    """Both sides of a failed comparison, shortened."""
    return f"expected {str(expected)[:200]}, got {str(got)[:200]}"
