"""The Decode side of a probe: opens Prefill's session, reads in three ways, checks every byte, reports."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import zmq

from rd2h.engines import AddressArray, EngineRole, MemoryRegion, TransferEngine, create_engine
from rd2h.errors import ConfigError, Rd2hError, TransferError, WireError
from rd2h.probing.buffers import ProbeBuffer, allocate, fill_byte
from rd2h.probing.messages import MAX_MESSAGE_BYTES, PROBE_VERSION, Offer, decode, encode
from rd2h.probing.pattern import chunks, pattern_bytes
from rd2h.probing.prefill import ProbeTimeoutError
from rd2h.probing.settings import ProbeSettings

GUARD_BYTES = 4096
CANARY = 0xA5
"""Fills the destination, and must still fill every byte of it that no descriptor names."""
MAX_SCATTERED = 4096
"""Descriptors of the scattered case."""


@dataclass(frozen=True, slots=True)
class CaseReport:
    """Outcome of one way of reading. Times are medians over the iterations."""

    case: str
    descriptors: int
    total_bytes: int
    median_ms: float
    gb_per_s: float
    wrong_bytes: int

    def line(self) -> str:
        """One line for people."""
        verdict = "bytes equal" if not self.wrong_bytes else f"{self.wrong_bytes} WRONG BYTES"
        return (
            f"{self.case:<10} {self.descriptors:>7} descriptors {self.total_bytes / 1e6:>10.1f} MB "
            f"{self.median_ms:>10.3f} ms {self.gb_per_s:>8.2f} GB/s  {verdict}"
        )


@dataclass(frozen=True, slots=True)
class Case:
    """Descriptors of one way of reading: offsets into both buffers, and lengths (bytes, uint64)."""

    name: str
    to: AddressArray
    source: AddressArray
    lengths: AddressArray


def run_decode(settings: ProbeSettings, as_json: bool) -> int:
    """Run the probe. Returns 0 when every byte was right, else 1. Raises Rd2hError when it could not be run."""
    engine = create_engine(settings.backend, settings.engine_options)
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    try:
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, settings.ipv6)
        socket.connect(f"tcp://{settings.endpoint}")
        hello = {"op": "hello", "v": PROBE_VERSION, "backend": settings.backend, "protocol": settings.protocol.value}
        offer = Offer.from_fields(_ask(socket, hello, settings))
        if offer.length > settings.size_bytes:
            raise ConfigError(
                f"Prefill offers {offer.length} bytes; --max-mib allows {settings.size_bytes}", key="--max-mib"
            )
        engine.initialize(EngineRole.DECODE)
        try:
            reports, call_us = _measure(settings, engine, offer)
        except Rd2hError:
            _ask(socket, {"op": "result", "passed": False}, settings)
            raise
        passed = not any(report.wrong_bytes for report in reports)
        _ask(socket, {"op": "result", "passed": passed}, settings)
        _print(settings, reports, call_us, passed, as_json)
        return 0 if passed else 1
    finally:
        socket.close()
        context.term()
        engine.close()


def make_cases(size_bytes: int, block_bytes: int, seed: int) -> list[Case]:
    """One descriptor; all whole blocks in random order; small unaligned pieces with gaps."""
    rng = np.random.default_rng(seed)
    blocks = size_bytes // block_bytes
    starts = np.arange(blocks, dtype=np.uint64) * np.uint64(block_bytes)
    whole = Case("whole", np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.full(1, size_bytes, np.uint64))
    order = rng.permutation(blocks).astype(np.int64)
    in_blocks = Case("blocks", starts, starts[order], np.full(blocks, block_bytes, np.uint64))
    # Pieces keep their place, so both sides have the same odd offsets; the gaps between them must stay canary.
    pieces = min(MAX_SCATTERED, max(size_bytes // 64, 1))
    pitch = size_bytes // pieces
    lengths = rng.integers(1, max(min(pitch, block_bytes) // 2, 1), size=pieces, endpoint=True).astype(np.uint64)
    shift = rng.integers(0, pitch - lengths.astype(np.int64), endpoint=True).astype(np.uint64)
    offsets = np.arange(pieces, dtype=np.uint64) * np.uint64(pitch) + shift
    mixed = rng.permutation(pieces).astype(np.int64)
    return [whole, in_blocks, Case("scattered", offsets[mixed], offsets[mixed], lengths[mixed])]


def expected_bytes(case: Case, offer: Offer) -> Callable[[int, int], np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """A function (start, size) -> what the destination must hold there after the case has been read."""
    order = np.argsort(case.to)
    to, source, lengths = (array[order].astype(np.int64) for array in (case.to, case.source, case.lengths))

    def expect(start: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        out = np.full(size, CANARY, dtype=np.uint8)
        first = int(np.searchsorted(to, start, side="right")) - 1
        for index in range(max(first, 0), to.size):
            begin = max(int(to[index]), start)
            end = min(int(to[index] + lengths[index]), start + size)
            if int(to[index]) >= start + size:
                break
            if begin < end:
                place = int(source[index]) + begin - int(to[index])
                out[begin - start : end - start] = pattern_bytes(offer.seed, place, end - begin)
        return out

    return expect


def _measure(settings: ProbeSettings, engine: TransferEngine, offer: Offer) -> tuple[list[CaseReport], float]:
    """Reports of all cases, and the median time of a read of one byte in microseconds."""
    buffer = allocate(settings.memory, offer.length + 2 * GUARD_BYTES, settings.device_id)
    engine.register_memory([MemoryRegion(buffer.addr, buffer.length)])
    engine.open_session(offer.session)
    reports = []
    for case in make_cases(offer.length, min(settings.block_bytes, offer.length), settings.seed):
        fill_byte(buffer, CANARY)
        local = case.to + np.uint64(buffer.addr + GUARD_BYTES)
        peer = case.source + np.uint64(offer.addr)
        seconds = [_read(engine, offer, local, peer, case.lengths) for _ in range(settings.iterations)]
        total = int(case.lengths.sum())
        median_s = statistics.median(seconds)
        wrong = _count_wrong(buffer, case, offer)
        reports.append(CaseReport(case.name, case.to.size, total, median_s * 1e3, total / median_s / 1e9, wrong))
    one = np.ones(1, dtype=np.uint64)
    local, peer = one * np.uint64(buffer.addr), one * np.uint64(offer.addr)
    call_s = statistics.median(_read(engine, offer, local, peer, one) for _ in range(200))
    return reports, call_s * 1e6


def _read(
    engine: TransferEngine, offer: Offer, local: AddressArray, peer: AddressArray, lengths: AddressArray
) -> float:
    started = time.perf_counter()
    result = engine.batch_transfer_sync_read(offer.session, local, peer, lengths)
    elapsed_s = time.perf_counter() - started
    if not result.ok:
        raise TransferError(result.message, code=result.code)
    return elapsed_s


def _count_wrong(buffer: ProbeBuffer, case: Case, offer: Offer) -> int:
    """Bytes of the destination, guards included, that are not what they must be."""
    expect = expected_bytes(case, offer)
    wrong = 0
    for start, size in chunks(offer.length):
        wrong += int(np.count_nonzero(buffer.read(GUARD_BYTES + start, size) != expect(start, size)))
    for start in (0, GUARD_BYTES + offer.length):
        wrong += int(np.count_nonzero(buffer.read(start, GUARD_BYTES) != CANARY))
    return wrong


def _ask(socket: zmq.Socket[bytes], fields: dict[str, object], settings: ProbeSettings) -> dict[str, object]:
    """One request and its answer. Raises ProbeTimeoutError, WireError."""
    socket.send(encode(fields))
    if not socket.poll(int(settings.timeout_s * 1000) + 1):
        where, waited = settings.endpoint, f"{settings.timeout_s:g} s"
        raise ProbeTimeoutError(f"Prefill at {where} has not answered {fields['op']!r} within {waited}")
    answer = decode(socket.recv())
    if answer.get("ok") is not True:
        raise WireError(f"Prefill refused {fields['op']!r}: {str(answer.get('error'))[:500]}")
    return answer


def _print(settings: ProbeSettings, reports: list[CaseReport], call_us: float, passed: bool, as_json: bool) -> None:
    if as_json:
        rows = [asdict(report) for report in reports]
        print(json.dumps({"backend": settings.backend, "passed": passed, "call_us": call_us, "rows": rows}), flush=True)
        return
    for report in reports:
        print(report.line())
    print(f"one byte   median {call_us:.1f} us a read")
    print(f"verdict: {'PASSED' if passed else 'FAILED'} ({settings.backend})", flush=True)
