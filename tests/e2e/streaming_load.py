"""Streams in progress while something is killed."""

import threading
import time
from dataclasses import dataclass, field

from rd2h.demo.completions import CompletionError, stream
from rd2h.demo.engine_spec import SERVED_NAME

FILLER = "and so the keys went down to the values, two by two, and every block was counted on the way; " * 3


@dataclass
class Attempt:
    """One streamed request of a worker."""

    prompt: str
    started_s: float
    first_token_s: float | None = None
    ended_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    error: CompletionError | None = None

    @property
    def finished(self) -> bool:
        """True when it ended the way a completion ends."""
        return self.ended_s is not None and self.error is None


class StreamingLoad:
    """Workers that stream one request after the other until told to stop. Times are time.monotonic()."""

    def __init__(self, url: str, workers: int = 4, max_tokens: int = 300) -> None:
        self._url = url
        self._max_tokens = max_tokens
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.attempts: list[Attempt] = []
        self._threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(workers)]

    def __enter__(self) -> "StreamingLoad":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()

    def in_progress(self) -> list[Attempt]:
        """Attempts that have got a token and have not ended."""
        with self._lock:
            return [a for a in self.attempts if a.first_token_s is not None and a.ended_s is None]

    def wait_streaming(self, count: int, timeout_s: float = 60.0) -> list[Attempt]:
        """Waits until `count` streams are in progress at once and returns them."""
        deadline = time.monotonic() + timeout_s
        while len(streams := self.in_progress()) < count:
            assert time.monotonic() < deadline, f"only {len(streams)} of {count} streams after {timeout_s} s"
            time.sleep(0.01)
        return streams

    def finish(self, timeout_s: float) -> list[Attempt]:
        """No new requests; waits for the ones in progress and returns all attempts."""
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hung = [a for a in self.attempts if a.ended_s is None]
        assert not hung, f"{len(hung)} requests without an answer {timeout_s} s after the last one was sent"
        return self.attempts

    def _work(self, worker: int) -> None:
        number = 0
        while not self._stopping.is_set():
            self._attempt(f"worker {worker}, story {number}: {FILLER}")
            number += 1

    def _attempt(self, prompt: str) -> None:
        attempt = Attempt(prompt, time.monotonic())
        with self._lock:
            self.attempts.append(attempt)
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": self._max_tokens, "temperature": 0}
        body["return_token_ids"] = True
        try:
            for piece in stream(self._url, body):
                if attempt.first_token_s is None and piece.token_ids:
                    attempt.first_token_s = time.monotonic()
                attempt.tokens += piece.token_ids
        except CompletionError as error:
            attempt.error = error
            # A dead server refuses at once; do not turn that into a busy loop.
            self._stopping.wait(0.05)
        attempt.ended_s = time.monotonic()
