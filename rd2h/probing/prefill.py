"""The Prefill side of a probe: registers a patterned buffer, tells Decode where it is, waits for Decode's verdict."""

from __future__ import annotations

import json
import time

import zmq

from rd2h.engines import EngineRole, MemoryRegion, TransferEngine, create_engine
from rd2h.errors import ConfigError, Rd2hError, WireError
from rd2h.probing.buffers import allocate, fill_pattern
from rd2h.probing.messages import MAX_MESSAGE_BYTES, PROBE_VERSION, Offer, decode, encode
from rd2h.probing.settings import ProbeSettings


class ProbeTimeoutError(Rd2hError):
    """The other side did not answer in time."""


def run_prefill(settings: ProbeSettings) -> int:
    """Serve one Decode. Returns 0 when it reported success, 1 when it reported failure."""
    engine = create_engine(settings.backend, settings.engine_options)
    try:
        engine.initialize(EngineRole.PREFILL)
        buffer = allocate(settings.memory, settings.size_bytes, settings.device_id)
        fill_pattern(buffer, settings.seed)
        engine.register_memory([MemoryRegion(buffer.addr, buffer.length)])
        offer = Offer(engine.session(), buffer.addr, buffer.length, settings.seed)
        return _serve(settings, engine, offer)
    finally:
        engine.close()


def _serve(settings: ProbeSettings, engine: TransferEngine, offer: Offer) -> int:
    context = zmq.Context()
    socket = context.socket(zmq.REP)
    try:
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.IPV6, settings.ipv6)
        try:
            socket.bind(f"tcp://{settings.endpoint}")
        except zmq.ZMQError as error:
            raise ConfigError(f"--listen {settings.endpoint}: {error}", key="--listen") from error
        bound = str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).removeprefix("tcp://")
        line = {"role": "prefill", "backend": engine.backend, "listen": bound, **offer.to_fields()}
        print(json.dumps(line), flush=True)
        return _answer_until_result(socket, settings, offer)
    finally:
        socket.close()
        context.term()


def _answer_until_result(socket: zmq.Socket[bytes], settings: ProbeSettings, offer: Offer) -> int:
    """Answer requests until a result comes; a request that makes no sense gets an error and changes nothing."""
    deadline = time.monotonic() + settings.timeout_s
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not socket.poll(int(left_s * 1000) + 1):
            raise ProbeTimeoutError(f"no Decode has reported a result within {settings.timeout_s:g} s")
        try:
            request = decode(socket.recv())
            answer, passed = _answer(request, settings, offer)
        except WireError as error:
            answer, passed = {"ok": False, "error": str(error)}, None
        socket.send(encode(answer))
        if passed is not None:
            print(json.dumps({"role": "prefill", "passed": passed}), flush=True)
            return 0 if passed else 1


def _answer(request: dict[str, object], settings: ProbeSettings, offer: Offer) -> tuple[dict[str, object], bool | None]:
    """The answer to one request, and Decode's verdict when the request was one."""
    match request.get("op"):
        case "hello":
            expected = {"v": PROBE_VERSION, "backend": settings.backend, "protocol": settings.protocol.value}
            for name, value in expected.items():
                if request.get(name) != value:
                    raise WireError(f"{name} differs: Prefill has {value!r}, Decode {str(request.get(name))[:40]!r}")
            return {"ok": True, **offer.to_fields()}, None
        case "result":
            passed = request.get("passed")
            if not isinstance(passed, bool):
                raise WireError("field passed must be true or false")
            return {"ok": True}, passed
        case other:
            raise WireError(f"unknown op {str(other)[:40]!r}; expected 'hello' or 'result'")
