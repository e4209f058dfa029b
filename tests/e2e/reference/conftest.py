"""Engines of the reference model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from rd2h.demo.chain import Chain, ConnectedEngine, MetaProcess
from rd2h.demo.launcher import Launcher
from rd2h.demo.process import ManagedProcess
from rd2h.reference.launch import ENGINE_ARGS, ENGINE_ENV, offload_args
from rd2h.reference.weights import SparseShape, sparse_model_dir

CHUNK_TOKENS = 256

MakeChain = Callable[[SparseShape], Chain]


@pytest.fixture(scope="session")
def make_sparse_chain(launcher: Launcher) -> MakeChain:
    """Chains of engines of any shape of the model."""

    def make(shape: SparseShape) -> Chain:
        model = sparse_model_dir(shape)
        return Chain(launcher, model, CHUNK_TOKENS, engine_args=ENGINE_ARGS, engine_env=ENGINE_ENV)

    return make


@pytest.fixture(scope="session")
def sparse_chain(make_sparse_chain: MakeChain) -> Chain:
    return make_sparse_chain(SparseShape())


@pytest.fixture(scope="session")
def sparse_single(sparse_chain: Chain) -> ManagedProcess:
    """The ordinary engine that answers are compared with."""
    engine = sparse_chain.start_single("sparse-single")
    sparse_chain.launcher.wait_engines([engine])
    return engine


@pytest.fixture(scope="session")
def sparse_meta(sparse_chain: Chain) -> MetaProcess:
    return sparse_chain.start_meta()


@pytest.fixture(scope="session")
def sparse_prefill(sparse_chain: Chain, sparse_meta: MetaProcess) -> ConnectedEngine:
    engine = sparse_chain.start_prefill(sparse_meta, "sparse-prefill")
    sparse_chain.launcher.wait_engines([engine.process])
    return engine


@pytest.fixture(scope="module")
def sparse_decode(sparse_chain: Chain, sparse_meta: MetaProcess) -> Iterator[ConnectedEngine]:
    """A Decode engine with a paged cache."""
    engine = sparse_chain.start_decode(sparse_meta, "sparse-decode")
    sparse_chain.launcher.wait_engines([engine.process])
    yield engine
    engine.process.stop()


@dataclass(frozen=True)
class OffloadPair:
    """A Decode engine with a host pool, behind a proxy of its own."""

    decode: ConnectedEngine
    proxy: ManagedProcess

    @property
    def url(self) -> str:
        """Where completions go."""
        return self.proxy.url

    def stop(self) -> None:
        self.proxy.stop()
        self.decode.process.stop()


StartOffload = Callable[..., OffloadPair]


@pytest.fixture(scope="session")
def start_offload() -> StartOffload:
    """Starts a Decode engine with ``buffer_tokens`` per row of the hot buffer, and a proxy in front of it."""

    def start(
        chain: Chain,
        meta: MetaProcess,
        prefill: ConnectedEngine,
        name: str,
        buffer_tokens: int,
        extra_args: tuple[str, ...] = (),
        **changes: object,
    ) -> OffloadPair:
        spec = {**changes, "extra_args": (*offload_args(buffer_tokens), *extra_args)}
        decode = chain.start_decode(meta, name, changes=spec)
        chain.launcher.wait_engines([decode.process])
        proxy = chain.start_proxy(meta, prefill.process, decode.process, f"{name}-proxy")
        return OffloadPair(decode, proxy)

    return start
