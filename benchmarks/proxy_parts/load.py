"""Many streams at a time, and how long each chunk was on its way."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from dataclasses import dataclass, field

_STAMP = re.compile(rb'"t":(\d+)')


@dataclass
class Load:
    """Streams against one port. Plain sockets: the client's own cost should stay small."""

    port: int
    streams: int
    chunks: int
    pace_ms: float
    latencies_us: list[float] = field(default_factory=list)
    finished: int = 0
    errors: list[str] = field(default_factory=list)
    begun: int = 0
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Runs all streams to their ends."""
        await asyncio.gather(*(self._stream() for _ in range(self.streams)))

    async def _stream(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = {"prompt": "benchmark", "stream": True, "max_tokens": self.chunks, "user": str(self.pace_ms)}
        text = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
        )
        writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + text)
        seen, tail, begun = 0, b"", False
        try:
            while data := await reader.read(1 << 16):
                now = time.monotonic_ns()
                window = tail + data
                # A stamp that is cut off is found again with the rest of it.
                end = 0
                for match in _STAMP.finditer(window):
                    if match.end() == len(window):
                        break
                    self.latencies_us.append((now - int(match[1])) / 1000)
                    seen += 1
                    end = match.end()
                tail = window[end:][-400:]
                if seen and not begun:
                    begun = True
                    self.begun += 1
                    if self.begun == self.streams:
                        self.all_begun.set()
            if seen == self.chunks and b"[DONE]" in tail:
                self.finished += 1
            else:
                self.errors.append(f"{seen} of {self.chunks} chunks, then {tail[-80:]!r}")
        except OSError as error:
            self.errors.append(repr(error))
        finally:
            writer.close()

    @property
    def p50_us(self) -> float:
        """Median time from the engine's write to the client's read."""
        return statistics.median(self.latencies_us)

    @property
    def p99_us(self) -> float:
        """99th percentile of the same."""
        return statistics.quantiles(self.latencies_us, n=100)[98]
