"""What a failed attempt says about the health of an engine.

Anybody can send requests that make a healthy engine answer 500: vLLM does so for a picture that it cannot fetch and for
some grammars. If these opened breakers, one client could keep all others from the engines.
"""

from __future__ import annotations

from rd2h_proxy.failure import AttemptError, Blame
from rd2h_proxy.openai_request import OpenAiRequest
from rd2h_proxy.pool import Lease

_BUSY = (429, 503)
_SERVER_ERROR = 500


def judge(lease: Lease, role: Blame, failure: AttemptError, request: OpenAiRequest, begun: bool) -> None:
    """Tells the engine's breaker of a failure, if it says something about the engine.

    `role`: the engine's. `begun`: it had accepted the request, so that a server error is one of its work. A server
    error before is held against it only when another engine serves the request (`AttemptError.doubtful`); one of a
    request with pictures never is, for what a URL points to may change from one attempt to the next. An engine whose
    server errors come from its own state shows it by its health check.
    """
    status = failure.answer.status
    if failure.blame is Blame.REQUEST:
        lease.succeeded()
    elif failure.blame is not role or status in _BUSY or (status == _SERVER_ERROR and request.media_tokens):
        return
    elif status == _SERVER_ERROR and not begun:
        failure.doubtful = True
    else:
        lease.failed()
