"""Peers that speak the wire by hand: a Decode (ROUTER) and a Prefill (DEALER) whose every frame a test decides."""

import secrets
import time
from typing import Any, Self

import zmq
from harness.plans import DecodeAddress

from rd2h.wire import (
    FromDecode,
    MfMeta,
    Ping,
    ReadyHead,
    decode_from_decode,
    decode_from_prefill,
    encode_mf_ack,
    encode_pong,
    encode_read_done,
)

RECEIVE_S = 20.0


class ScriptedDecode:
    """A Decode rank that answers only what it is told to."""

    def __init__(self, *, legacy: bool = False, port: int = 0) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        bound = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.generation = None if legacy else secrets.randbits(63)
        self.address = DecodeAddress(bound, self.generation)
        self.identity = b""
        self.frames: list[bytes] = []

    def receive(self, within_s: float = RECEIVE_S) -> MfMeta | ReadyHead:
        """The next metadata or ready message; heartbeats' echoes are passed over."""
        end = time.monotonic() + within_s
        while self._socket.poll(max(0, int((end - time.monotonic()) * 1000))):
            self.identity, payload = self._socket.recv_multipart()
            self.frames.append(payload)
            message = decode_from_prefill(payload)
            if isinstance(message, MfMeta | ReadyHead):
                return message
        raise AssertionError(f"Prefill sent nothing within {within_s:g} s")

    def silent(self, for_s: float) -> bool:
        """Whether nothing arrives for a while."""
        return not self._socket.poll(int(for_s * 1000))

    def send(self, payload: bytes) -> None:
        """Send to the latest peer."""
        self._socket.send_multipart((self.identity, b"", payload))

    def handshake(self) -> MfMeta:
        """Take metadata in and answer it."""
        meta = self.receive()
        assert isinstance(meta, MfMeta)
        self.send(b"ACK" if self.generation is None else encode_mf_ack(self.generation, time.monotonic_ns()))
        return meta

    def ready(self) -> ReadyHead:
        """The next message, which must be a ready message."""
        message = self.receive()
        assert isinstance(message, ReadyHead), message
        return message

    def done(self, head: ReadyHead) -> None:
        """Acknowledge a layer."""
        self.send(encode_read_done(head.layer_idx, head.seq))

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ScriptedPrefill:
    """A Prefill rank's connection."""

    def __init__(self, port: int, generation: int = 0) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._generation = generation

    def send(self, *frames: bytes) -> None:
        """Send one message."""
        self._socket.send_multipart(frames)

    def receive_raw(self, within_s: float = RECEIVE_S) -> bytes:
        """The payload of the next reply that is no heartbeat; heartbeats are echoed when a generation is set."""
        end = time.monotonic() + within_s
        while self._socket.poll(max(0, int((end - time.monotonic()) * 1000))):
            frames = self._socket.recv_multipart()
            assert len(frames) == 2, frames
            assert frames[0] == b""
            if b"ping" in frames[1][:8]:
                message = decode_from_decode(frames[1])
                if isinstance(message, Ping) and self._generation:
                    self.send(encode_pong(self._generation, message.clock_ns))
                continue
            return frames[1]
        raise AssertionError(f"Decode sent nothing within {within_s:g} s")

    def receive(self, within_s: float = RECEIVE_S) -> FromDecode:
        """The next reply, decoded."""
        return decode_from_decode(self.receive_raw(within_s))

    def silent(self, for_s: float) -> bool:
        """Whether nothing arrives for a while."""
        return not self._socket.poll(int(for_s * 1000))

    def drain(self) -> int:
        """Throw away what has arrived; returns how many messages."""
        count = 0
        while self._socket.poll(0):
            self._socket.recv_multipart()
            count += 1
        return count

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
