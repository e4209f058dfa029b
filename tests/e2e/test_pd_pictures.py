"""Chats with pictures through the proxy have the answer of one engine (X6), by a real model that sees.

A picture is many placeholder tokens of the prompt. Prefill computes their KV from the pixels; Decode counts the same
tokens but pulls them like all others, and caches them under the picture's hash, not under the placeholders alone.
"""

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from engine_state import wait_nothing_left
from openai_answers import ask, differences, normalised
from picture_model import MERGE, PATCH, make_picture_model
from pictures import data_url, picture

from rd2h.demo.chain import Chain, ConnectedEngine, MetaProcess
from rd2h.demo.counters import PromptCounters
from rd2h.demo.launcher import Launcher
from rd2h.demo.model import ModelShape
from rd2h.demo.process import ManagedProcess
from rd2h.demo.timeline import pulled_bytes

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]
PATH = "/v1/chat/completions"
CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * ModelShape().kv_bytes_per_token_layer * ModelShape().layers
MOST_PICTURES = 4
ENGINE_ARGS = ("--trust-remote-code", "--limit-mm-per-prompt", json.dumps({"image": MOST_PICTURES}))
# Square pictures of this side have SIDE_TOKENS placeholder tokens.
SIDE = 6 * PATCH
SIDE_TOKENS = 6 * 6 // (MERGE[0] * MERGE[1])
LONG = "A long introduction to a picture that one ought to have seen. "


@dataclass(frozen=True)
class Seeing:
    """A chain of engines with the model that sees."""

    meta: MetaProcess
    single: ManagedProcess
    prefill: ConnectedEngine
    decode: ConnectedEngine
    proxy: ManagedProcess

    def answers(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """The good answers of the proxy and of the single engine."""
        replies = []
        for url in (self.proxy.url, self.single.url):
            status, text = ask(url, PATH, body)
            assert status == 200, text
            replies.append(normalised(text))
        return replies[0], replies[1]


@pytest.fixture(scope="module")
def seeing(launcher: Launcher, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    model = make_picture_model(tiny_model, tmp_path_factory.mktemp("seeing-model"))
    chain = Chain(launcher, model, CHUNK_TOKENS, engine_args=ENGINE_ARGS)
    meta = chain.start_meta()
    single = chain.start_single("seeing-single")
    prefill, decode = chain.start_prefill(meta, "seeing-prefill"), chain.start_decode(meta, "seeing-decode")
    launcher.wait_engines([single, prefill.process, decode.process])
    proxy = chain.start_proxy(meta, prefill.process, decode.process, "seeing-proxy")
    yield Seeing(meta, single, prefill, decode, proxy)
    for process in (proxy, decode.process, prefill.process, single, meta.process):
        process.stop()


class Host(BaseHTTPRequestHandler):
    """Serves one picture, and 404 for all else."""

    picture = base64.b64decode(picture(SIDE, SIDE, 50)["image_url"]["url"].partition(",")[2])
    served: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        self.served[self.path] += 1
        found = self.path == "/picture.png"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(self.picture if found else b"")

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def host() -> Iterator[str]:
    """URL of a server of pictures."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 16, **fields}


CASES: dict[str, tuple[Any, ...]] = {
    "after text": (text("What do you see in this picture?"), picture(SIDE, SIDE, 1)),
    "before text": (picture(SIDE, SIDE, 2), text("What do you see?")),
    "alone": (picture(SIDE, SIDE, 3),),
    "two": (text("Compare "), picture(SIDE, SIDE, 4), text(" with "), picture(PATCH * 3, PATCH * 8, 5), text("!")),
    "one point": (text("Very small: "), picture(1, 1, 6)),
    "several MB, shrunk": (text("Large: "), picture(1100, 900, 7)),
    "across two chunks": (text((LONG * 5)[:242]), picture(SIDE, SIDE, 8), text("And now?")),
    "long": (text(LONG * 8), picture(SIDE, SIDE, 9), text(LONG * 6), picture(SIDE, SIDE, 10), text("Well?")),
}


@pytest.mark.parametrize("case", CASES)
def test_same_answer_tokens_and_bytes(case: str, seeing: Seeing) -> None:
    seeing.decode.timeline.new_events()
    before = PromptCounters.read(seeing.decode.url)
    proxied, alone = seeing.answers(chat(*CASES[case], return_token_ids=True))
    assert differences(proxied, alone) == []
    prompt_tokens = alone["usage"]["prompt_tokens"]
    assert len(alone["prompt_token_ids"]) == prompt_tokens
    wait_nothing_left(seeing.meta, seeing.proxy, seeing.prefill, seeing.decode)
    counted = PromptCounters.read(seeing.decode.url) - before
    # Decode computes the last token only, which is text: it never looks at a picture.
    assert counted.computed_tokens == 1
    blocks = -(-prompt_tokens // BLOCK_TOKENS) - counted.cached_tokens // BLOCK_TOKENS
    assert counted.pulled_bytes == pulled_bytes(seeing.decode.timeline.new_events()) == blocks * BLOCK_BYTES


@pytest.mark.parametrize("case", ["after text", "two"])
def test_same_stream(case: str, seeing: Seeing) -> None:
    proxied, alone = seeing.answers(chat(*CASES[case], stream=True, stream_options={"include_usage": True}))
    assert differences(proxied, alone) == []


def test_same_choices(seeing: Seeing) -> None:
    proxied, alone = seeing.answers(chat(*CASES["before text"], n=2, seed=3, temperature=0.7))
    assert differences(proxied, alone) == []
    assert len(alone["choices"]) == 2


def test_another_picture_is_another_answer_and_another_cache_entry(seeing: Seeing) -> None:
    """Two chats that differ in pixels only: their token ids are the same."""
    before_picture = text("Have you seen this one already? Look at it. ")
    contents = set()
    for seed in (20, 21, 20):
        cached = PromptCounters.read(seeing.decode.url).cached_tokens
        body = chat(before_picture, picture(SIDE, SIDE, seed), text("Say what it is, please: "), return_token_ids=True)
        proxied, alone = seeing.answers(body)
        assert differences(proxied, alone) == []
        contents.add(alone["choices"][0]["message"]["content"])
        ids = alone["prompt_token_ids"]
        placeholders = [place for place, token in enumerate(ids) if ids.count(token) == SIDE_TOKENS and token > 255]
        assert len(placeholders) == SIDE_TOKENS
        found = PromptCounters.read(seeing.decode.url).cached_tokens - cached
        if seed == 21:
            assert found <= placeholders[0]
            assert found >= BLOCK_TOKENS
    # The second time it is found, picture and all.
    assert found > placeholders[-1]
    assert len(contents) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "parts",
    [
        [data_url(b"this is no picture")],
        [data_url(b"")],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%%"}}],
        [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}],
        [{"type": "image_url", "image_url": {"url": "no url"}}],
        [{"type": "image_url"}],
        [picture(8, 8, 30)] * (MOST_PICTURES + 1),
        [text(LONG * 70), picture(8, 8, 31)],
    ],
    ids=["no picture", "empty", "not base64", "file", "no url", "nothing", "too many", "too long"],
)
def test_same_refusal(parts: list[Any], stream: bool, seeing: Seeing) -> None:
    check_refusal(chat(*parts, stream=stream), seeing)


def check_refusal(body: dict[str, Any], seeing: Seeing) -> None:
    """The proxy refuses as the engine does. That is not held against the engines: the chain stays in service."""
    status, refusal = ask(seeing.single.url, PATH, body)
    # What it cannot or may not fetch is a 500 of vLLM's.
    assert 400 <= status <= 500, refusal
    began = time.monotonic()
    proxied_status, proxied_refusal = ask(seeing.proxy.url, PATH, body)
    # At once: Decode's refusal is not kept for a rendezvous that cannot come.
    assert time.monotonic() - began < 5
    assert (proxied_status, json.loads(proxied_refusal)) == (status, json.loads(refusal))
    wait_nothing_left(seeing.meta, seeing.proxy, seeing.prefill, seeing.decode)


def test_picture_that_the_engines_fetch(host: str, seeing: Seeing) -> None:
    where = {"type": "image_url", "image_url": {"url": f"{host}/picture.png"}}
    Host.served.clear()
    proxied, alone = seeing.answers(chat(text("From afar: "), where))
    assert differences(proxied, alone) == []
    # The single engine, Prefill and Decode, each for itself.
    assert Host.served == {"/picture.png": 3}
    near, _ = seeing.answers(chat(text("From afar: "), picture(SIDE, SIDE, 50)))
    assert differences(near, proxied) == []


def test_picture_that_is_not_there(host: str, seeing: Seeing) -> None:
    for number in range(4):
        where = {"type": "image_url", "image_url": {"url": f"{host}/absent-{number}.png"}}
        check_refusal(chat(text("From afar: "), where), seeing)
    seeing.answers(chat(text("Still in service?")))


def test_tokenize_counts_the_picture(seeing: Seeing) -> None:
    body = chat(*CASES["two"])
    status, refusal = ask(seeing.single.url, "/tokenize", body)
    assert (status, refusal) == ask(seeing.proxy.url, "/tokenize", body)
    assert status == 200
    assert json.loads(refusal)["count"] > SIDE_TOKENS
