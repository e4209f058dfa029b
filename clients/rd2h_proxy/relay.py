"""Sending an engine's answer to the client, byte for byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from rd2h_proxy.continued_answer import Answer
from rd2h_proxy.drain import Drain, StoppingError
from rd2h_proxy.errors import ErrorAnswer
from rd2h_proxy.failure import AttemptError
from rd2h_proxy.stall import StallGuard, Writing


class ClientGoneError(Exception):
    """The client closed its connection."""


class StreamCutError(AttemptError):
    """The answer broke after the client had got some of it; it has been told so in the stream."""

    def __init__(self, failure: AttemptError, response: web.StreamResponse) -> None:
        super().__init__(failure.answer, str(failure), failure.blame, failure.address)
        self.response = response

    @property
    def retryable(self) -> bool:
        """Never: text would be repeated."""
        return False


def error_response(answer: ErrorAnswer, request_id: str) -> web.Response:
    """A complete error response."""
    headers = {"Content-Type": answer.content_type, "X-Request-Id": request_id}
    if answer.retry_after_s is not None:
        headers["Retry-After"] = str(answer.retry_after_s)
    return web.Response(status=answer.status, body=answer.body, headers=headers)


async def relay(
    http: web.Request, answer: Answer, request_id: str, guard: StallGuard, drain: Drain
) -> web.StreamResponse:
    """Passes the answer on.

    Raises:
        StreamCutError: the engine's stream ended early, or the proxy has to stop; an error event ends the client's.
        ClientGoneError: the client does not read any more.
    """
    headers = {"Content-Type": answer.content_type, "X-Request-Id": request_id}
    if not answer.streaming:
        return web.Response(body=answer.head, headers=headers)
    # A reverse proxy in front must not collect the events.
    response = web.StreamResponse(headers=headers | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    if http.transport is None:
        raise ClientGoneError("the connection was closed before the answer began")
    with guard.watch(http.transport) as writing:
        try:
            writing.since = time.monotonic()
            await response.prepare(http)
        except ConnectionError as error:
            raise ClientGoneError(str(error)) from error
        await _pass_chunks(response, answer, writing, drain)
    return response


async def _pass_chunks(response: web.StreamResponse, answer: Answer, writing: Writing, drain: Drain) -> None:
    tail = chunk = answer.head
    ticket = drain.ticket()
    ticket.writing = lambda: writing.since is not None
    try:
        with _told_of_the_end(drain):
            # An empty chunk would end a chunked body; the head may be empty when its first event is held back.
            while chunk or (chunk := await answer.next_chunk()):
                tail = chunk
                writing.since = time.monotonic()
                try:
                    await response.write(chunk)
                except ConnectionError as error:
                    raise ClientGoneError(str(error)) from error
                writing.since = None
                chunk = b""
                if ticket.interrupted:
                    raise StoppingError
    except AttemptError as failure:
        writing.since = time.monotonic()
        await _end_with_error(response, failure, mid_event=bool(tail) and not tail.endswith((b"\n\n", b"\r\n\r\n")))
        raise StreamCutError(failure, response) from failure
    finally:
        await answer.close()
    writing.since = time.monotonic()
    try:
        await response.write_eof()
    except ConnectionError as error:
        raise ClientGoneError(str(error)) from error


@contextmanager
def _told_of_the_end(drain: Drain) -> Iterator[None]:
    """Makes the drain's interruption a failure like any other, which the client is told in the stream."""
    try:
        yield
    except asyncio.CancelledError:
        if drain.took_cancellation():
            raise StoppingError from None
        raise


async def _end_with_error(response: web.StreamResponse, failure: AttemptError, mid_event: bool) -> None:
    event = failure.answer.as_sse_event()
    try:
        # Half an event is still in the client's reader; a blank line keeps it from swallowing ours.
        await response.write(b"\n\n" + event if mid_event else event)
        await response.write_eof()
    except ConnectionError as error:
        raise ClientGoneError(str(error)) from error
