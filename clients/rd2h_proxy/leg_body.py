"""Request bodies of the two legs, made from the client's body."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rd2h_client import kv_params
from rd2h_client.v1.rendezvous_pb2 import Child

from rd2h_proxy.openai_request import JsonObject, OpenAiRequest

# The header names the engine request, so a second name in the body would only confuse.
PROXY_OWNED = ("kv_transfer_params", "request_id")
# Prefill's own answer is thrown away: nothing that only enriches an answer is asked for.
_ANSWER_ONLY = (
    "stream_options",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_prompt_text",
    "stream_interval",
)


@dataclass(frozen=True, slots=True)
class LegIds:
    """Names that both legs of one attempt share."""

    rendezvous_id: str
    """Random, new for every attempt."""
    x_request_id: str
    """Value of the X-Request-Id header; the engines build their request ids from it."""


def encode(body: JsonObject) -> bytes:
    """The JSON text that is sent to an engine."""
    return json.dumps(body, separators=(",", ":")).encode()


def decode_body(request: OpenAiRequest, ids: LegIds, metaserver: str) -> JsonObject:
    """The client's body with what Decode needs to meet Prefill."""
    body = {key: value for key, value in request.body.items() if key not in PROXY_OWNED}
    body["kv_transfer_params"] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "metaserver": metaserver,
        "rendezvous_id": ids.rendezvous_id,
        "x_request_id": ids.x_request_id,
    }
    return body


def prefill_body(request: OpenAiRequest, ids: LegIds, children: Sequence[Child]) -> JsonObject:
    """The body that makes a Prefill engine compute the prompts of `children` once and feed them all.

    With fewer children than the request has, only their prompts are sent, and `prompt_index` counts within that
    sub-list.
    """
    body = {key: value for key, value in request.body.items() if key not in PROXY_OWNED and key not in _ANSWER_ONLY}
    indices = sorted({child.prompt_index for child in children})
    if len(indices) < request.prompts:
        prompts = request.body["prompt"]
        body["prompt"] = [prompts[index] for index in indices]
        children = _renumbered(children, indices)
    if "echo" in body and "prompt" in body:
        body["echo"] = False
    body.update(n=1, stream=False, max_tokens=1, min_tokens=1, max_completion_tokens=1)
    params = kv_params.batch_params(children)
    params.update(rendezvous_id=ids.rendezvous_id, x_request_id=ids.x_request_id)
    body["kv_transfer_params"] = params
    return body


def _renumbered(children: Sequence[Child], indices: Sequence[int]) -> list[Child]:
    position = {index: place for place, index in enumerate(indices)}
    renumbered = []
    for child in children:
        copy = Child()
        copy.CopyFrom(child)
        copy.prompt_index = position[child.prompt_index]
        renumbered.append(copy)
    return renumbered
