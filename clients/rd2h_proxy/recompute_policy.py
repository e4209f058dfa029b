"""When to keep the token ids of an answer, so that a request which Decode gives back can be continued.

A Decode engine under memory pressure may end a request with stop reason "recomputed": it has thrown its KV away and
cannot compute the prompt itself. The scheduler of vllm-ascend does so; upstream vLLM does not.
"""

from __future__ import annotations

from rd2h_proxy.limits import RecomputeMode
from rd2h_proxy.openai_request import JsonObject, OpenAiRequest
from rd2h_proxy.target import Target

RECOMPUTED = "recomputed"


def tracks_tokens(mode: RecomputeMode, request: OpenAiRequest, decode: Target) -> bool:
    """Whether to ask Decode for token ids on behalf of the proxy."""
    if mode is RecomputeMode.OFF or cannot_continue(request) is not None:
        return False
    if mode is RecomputeMode.ON:
        return True
    engines = decode.engines.values()
    # "host" is the engine for machines without an NPU, where the scheduler is upstream's.
    return not engines or any(engine.layout.transfer_backend != "host" for engine in engines)


def cannot_continue(request: OpenAiRequest) -> str | None:
    """Why a continuation from token ids could not be exact; None when it can."""
    body = request.body
    if body.get("echo"):
        return "echo was asked for"
    if request.media_tokens:
        return "the messages hold more than text"
    if _constrained(body):
        return "the output is constrained by a grammar, whose state is lost"
    return None


def _constrained(body: JsonObject) -> bool:
    response_format = body.get("response_format")
    free_form = response_format is None or (isinstance(response_format, dict) and response_format.get("type") == "text")
    return not free_form or body.get("structured_outputs") is not None or _constrained_calls(body)


def _constrained_calls(body: JsonObject) -> bool:
    choice, tools = body.get("tool_choice"), body.get("tools")
    if choice not in (None, "auto", "none"):
        return True
    if choice == "none" or not isinstance(tools, list):
        return False
    # "auto" is free form unless the client wants schemas to be kept or at most one call: then calls obey a grammar.
    return body.get("parallel_tool_calls") is False or any(_is_strict(tool) for tool in tools)


def _is_strict(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("strict"))
