"""The leg whose answer the client gets: sends it, and holds the answer back until it is known to be one."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp

from rd2h_proxy.engine_http import MAX_ERROR_BYTES, AnswerTooLargeError, read_bounded
from rd2h_proxy.errors import JSON_TYPE
from rd2h_proxy.failure import AttemptError, Blame, engine_failure, refused_by_engine
from rd2h_proxy.sse import SseOverflowError, SseReader, event_data

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 64 << 20
# The first event of a long prompt may carry all its token ids.
MAX_EVENT_BYTES = 16 << 20
EVENT_STREAM = "text/event-stream"


@dataclass(slots=True)
class EngineAnswer:
    """An engine's good answer: complete, or a stream of which the first event has been seen."""

    response: aiohttp.ClientResponse
    blame: Blame
    """The role of the engine."""
    address: str
    content_type: str
    head: bytes
    """The bytes read so far."""
    streaming: bool
    failure: AttemptError | None = None
    """Set by `fail`: why the stream was cut from our side."""

    async def next_chunk(self) -> bytes:
        """The next bytes after `head`, as they come; empty at the end.

        Raises:
            AttemptError: the stream ended early.
        """
        try:
            chunk = await self.response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._cut(error) from error
        if self.failure is not None:
            raise self.failure
        return chunk

    async def whole_stream(self) -> AsyncGenerator[bytes, None]:
        """All bytes from the beginning."""
        yield self.head
        while chunk := await self.next_chunk():
            yield chunk

    def _cut(self, error: Exception) -> AttemptError:
        return self.failure or engine_failure(self.blame, self.address, f"stream broke: {describe(error)}")

    def fail(self, failure: AttemptError) -> None:
        """Cuts the stream; a reader in `next_chunk` gets `failure`."""
        if self.failure is None:
            self.failure = failure
        self.response.close()

    def end(self, clean: bool) -> None:
        """Lets go of the connection: kept for reuse after a complete answer, else closed, which aborts the engine."""
        if clean:
            self.response.release()
        else:
            self.response.close()


@contextmanager
def reading(answer: EngineAnswer) -> Iterator[None]:
    """For code that takes an answer's JSON apart: what an engine would never send becomes the engine's failure.

    Raises:
        AttemptError: a part is missing, or of another kind.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        log.warning("%s engine %s sent nonsense", answer.blame.value, answer.address, exc_info=error)
        raise engine_failure(answer.blame, answer.address, f"sent nonsense: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """An exception's text, or its name when it has none."""
    return str(error) or type(error).__name__


async def open_answer(
    session: aiohttp.ClientSession, blame: Blame, address: str, path: str, body: bytes, headers: Mapping[str, str]
) -> EngineAnswer:
    """Sends the leg and returns when the first event, or the whole answer, is there.

    An engine's server sends its status line before the request has done anything, so 200 proves nothing; only the
    first event does.

    Raises:
        AttemptError: refused, dropped, or an error event first.
    """
    try:
        response = await session.post(f"http://{address}{path}", data=body, headers=headers, allow_redirects=False)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise engine_failure(blame, address, describe(error)) from error
    try:
        return await _read_head(response, blame, address)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        response.close()
        raise engine_failure(blame, address, f"answer broke: {describe(error)}") from error
    except (AnswerTooLargeError, SseOverflowError) as error:
        response.close()
        raise engine_failure(blame, address, str(error)) from error
    except BaseException:
        # Above all cancellation: closing the connection is how the engine learns that nobody waits.
        response.close()
        raise


async def _read_head(response: aiohttp.ClientResponse, blame: Blame, address: str) -> EngineAnswer:
    content_type = response.headers.get("Content-Type", JSON_TYPE)
    if response.status != 200:
        body = await read_bounded(response, MAX_ERROR_BYTES)
        after = response.headers.get("Retry-After")
        raise refused_by_engine(blame, address, response.status, body, content_type, after)
    if not content_type.startswith(EVENT_STREAM):
        body = await read_bounded(response, MAX_ANSWER_BYTES)
        if not body:
            raise engine_failure(blame, address, "answered 200 with an empty body")
        return EngineAnswer(response, blame, address, content_type, body, streaming=False)
    head = await _first_event(response, blame, address)
    return EngineAnswer(response, blame, address, content_type, head, streaming=True)


async def _first_event(response: aiohttp.ClientResponse, blame: Blame, address: str) -> bytes:
    reader = SseReader(MAX_EVENT_BYTES)
    head = bytearray()
    async for chunk in response.content.iter_any():
        head += chunk
        for event in reader.feed(chunk):
            data = event_data(event)
            if data is None:
                continue
            if data == b"[DONE]":
                raise engine_failure(blame, address, "closed the stream without one event")
            _refuse_error_event(data, response, blame, address)
            return bytes(head)
        if len(head) > MAX_EVENT_BYTES:
            raise SseOverflowError(f"more than {MAX_EVENT_BYTES} bytes before the first event")
    raise engine_failure(blame, address, "closed the stream before the first event")


def _refuse_error_event(data: bytes, response: aiohttp.ClientResponse, blame: Blame, address: str) -> None:
    if not data.startswith(b"{") or b'"error"' not in data:
        return
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise engine_failure(blame, address, f"first event is not JSON: {error}") from error
    if not isinstance(event, dict) or "error" not in event or event["error"] is None:
        return
    detail = event["error"]
    code = detail.get("code") if isinstance(detail, dict) else None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    failure = refused_by_engine(blame, address, status, json.dumps({"error": detail}).encode(), JSON_TYPE, None)
    response.close()
    raise failure
