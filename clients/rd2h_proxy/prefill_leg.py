"""The Prefill leg: one dispatch for one wave of children."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp

from rd2h_proxy.answer_leg import MAX_ANSWER_BYTES, describe
from rd2h_proxy.engine_http import MAX_ERROR_BYTES, AnswerTooLargeError, read_bounded
from rd2h_proxy.errors import JSON_TYPE
from rd2h_proxy.failure import AttemptError, Blame, engine_failure, refused_by_engine


class NotAcceptedError(Exception):
    """The engine never began the request, so sending the same children to another engine is safe."""

    def __init__(self, failure: AttemptError) -> None:
        super().__init__(str(failure))
        self.failure = failure


async def run_prefill(
    session: aiohttp.ClientSession, address: str, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float
) -> None:
    """Sends one wave and returns when Prefill has computed it. Its answer carries nothing that anyone needs.

    Raises:
        NotAcceptedError: connection refused, or the engine is full.
        AttemptError: anything else that is not a success.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=session.timeout.sock_connect, sock_read=timeout_s)
    try:
        async with session.post(
            f"http://{address}{path}", data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status == 200:
                await read_bounded(response, MAX_ANSWER_BYTES)
                return
            answer = await read_bounded(response, MAX_ERROR_BYTES)
            content_type = response.headers.get("Content-Type", JSON_TYPE)
            after = response.headers.get("Retry-After")
            failure = refused_by_engine(Blame.PREFILL, address, response.status, answer, content_type, after)
    except aiohttp.ClientConnectorError as error:
        raise NotAcceptedError(engine_failure(Blame.PREFILL, address, describe(error))) from error
    except (aiohttp.ClientError, TimeoutError, OSError, AnswerTooLargeError) as error:
        raise engine_failure(Blame.PREFILL, address, describe(error)) from error
    if failure.answer.status in (429, 503):
        raise NotAcceptedError(failure)
    raise failure
