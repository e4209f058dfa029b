"""Real vLLM engines for the end-to-end tests, forked from one process that has imported vLLM."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rd2h.demo.chain import Chain, ConnectedEngine, MetaProcess
from rd2h.demo.launcher import Launcher
from rd2h.demo.model import model_dir
from rd2h.demo.process import ManagedProcess

CHUNK_TOKENS = 256
TOOL_ARGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="session")
def monkeypatch_session() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory, monkeypatch_session: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Owns every process of the session."""
    # Where transformers puts the code that comes with a model; it reads the name once, in the fork server.
    monkeypatch_session.setenv("HF_MODULES_CACHE", str(tmp_path_factory.mktemp("model-code")))
    with Launcher(tmp_path_factory.mktemp("e2e-logs"), lambda text: print(text, flush=True)) as launcher:
        yield launcher


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return model_dir()


@pytest.fixture(scope="session")
def chain(launcher: Launcher, tiny_model: Path) -> Chain:
    return Chain(launcher, tiny_model, CHUNK_TOKENS, engine_args=TOOL_ARGS)


@pytest.fixture(scope="session")
def single(chain: Chain) -> ManagedProcess:
    """The ordinary engine that answers are compared with."""
    engine = chain.start_single()
    chain.launcher.wait_engines([engine])
    return engine


@pytest.fixture(scope="session")
def meta(chain: Chain) -> MetaProcess:
    return chain.start_meta()


@pytest.fixture(scope="session")
def pair(chain: Chain, meta: MetaProcess) -> tuple[ConnectedEngine, ConnectedEngine]:
    """A Prefill and a Decode engine that outlive all tests that only send requests."""
    prefill, decode = chain.start_prefill(meta), chain.start_decode(meta)
    chain.launcher.wait_engines([prefill.process, decode.process])
    return prefill, decode


@pytest.fixture(scope="session")
def prefill(pair: tuple[ConnectedEngine, ConnectedEngine]) -> ConnectedEngine:
    return pair[0]


@pytest.fixture(scope="session")
def decode(pair: tuple[ConnectedEngine, ConnectedEngine]) -> ConnectedEngine:
    return pair[1]


@pytest.fixture(scope="session")
def proxy(
    chain: Chain, meta: MetaProcess, prefill: ConnectedEngine, decode: ConnectedEngine, single: ManagedProcess
) -> ManagedProcess:
    return chain.start_proxy(meta, prefill.process, decode.process)
