"""``kv_transfer_params`` of a request: what they must look like, and which child a request is.

They come from a client by way of a proxy, so everything is checked; ``RequestError`` names key and value.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rd2h.errors import RequestError
from rd2h.topology import MAX_PORT
from rd2h.wire import TOKEN_BYTES

BATCH_KEY = "batch_kv_transfer_params"
MAX_CHILDREN = 16384
MAX_RENDEZVOUS_ID = 128
_REACHABLE_BY = ("remote_host", "remote_port", "remote_tp_size", "token", "generation")
_SUFFIX = re.compile(r"(?:-[0-9a-f]{8})?")
_CHOICE = re.compile(r"(\d{1,6})_")
_PROMPT = re.compile(r"-(\d{1,6})(?:-[0-9a-f]{8})?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_TOKEN = re.compile(rf"[0-9a-f]{{{2 * TOKEN_BYTES}}}")
_FINGERPRINT = re.compile(r"(?:[0-9a-f]{2}){0,64}")


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """Decode's part: this request's KV comes from elsewhere, met through ``rendezvous_id``."""

    rendezvous_id: str
    x_request_id: str


@dataclass(frozen=True, slots=True)
class RemoteDecode:
    """Prefill's part: one child to publish to."""

    request_id: str
    engine_id: str
    host: str
    base_port: int
    tp_size: int
    cached_tokens: int
    prompt_index: int
    prompt_tokens: int | None
    token: bytes | None
    generation: int | None
    layout_fingerprint: bytes

    @property
    def legacy(self) -> bool:
        """Whether this Decode does not speak our extensions."""
        return self.generation is None


@dataclass(frozen=True, slots=True)
class BrokenChild:
    """A child whose parameters cannot be used, with what is needed to tell it so."""

    request_id: str
    """Empty where even that is unknown."""
    reason: str
    reachable: RemoteDecode | None
    """Address, token and generation where these are good; nothing else in it means anything."""


@dataclass(frozen=True, slots=True)
class RemoteDecodes:
    """All children of one Prefill dispatch."""

    x_request_id: str
    rendezvous_id: str
    children: tuple[RemoteDecode, ...]
    broken: tuple[BrokenChild, ...] = ()

    def of_prompt(self, request_id: str) -> tuple[RemoteDecode, ...]:
        """Children fed by the engine request ``request_id``; raises RequestError when it cannot be placed."""
        if not self.children:
            return ()
        if len({child.prompt_index for child in self.children}) == 1 and not self.broken:
            return self.children
        prompt, _ = place_of(request_id, self.x_request_id)
        found = tuple(child for child in self.children if child.prompt_index == prompt)
        if not found and not self.broken:  # a broken child's prompt is not known: it may be this one
            raise RequestError(f"no entry of {BATCH_KEY} has prompt_index {prompt} (request {request_id!r})")
        return found


def place_of(request_id: str, x_request_id: str) -> tuple[int, int]:
    """(prompt index, choice index) of an engine request id, given the id that the proxy chose.

    vLLM makes ``[<choice>_]cmpl-<x>-<prompt>[-<8 hex>]`` or ``[<choice>_]chatcmpl-<x>[-<8 hex>]``. Raises RequestError.
    """
    choice = 0
    rest = request_id
    for prefix in ("cmpl-", "chatcmpl-"):
        begin = rest.find(prefix + x_request_id)
        if begin < 0:
            continue
        if begin > 0:
            matched = _CHOICE.fullmatch(rest[:begin])
            if matched is None:
                continue
            choice = int(matched.group(1))
        tail = rest[begin + len(prefix) + len(x_request_id) :]
        if prefix == "chatcmpl-":
            if _SUFFIX.fullmatch(tail):
                return 0, choice
        elif (found := _PROMPT.fullmatch(tail)) is not None:
            return int(found.group(1)), choice
    raise RequestError(f"request id {request_id!r} does not come from x_request_id {x_request_id!r}")


def external_id(request_id: str) -> str:
    """The id under which a legacy Prefill names a request: without vLLM's random suffix."""
    matched = re.fullmatch(r"(.+)-[0-9a-f]{8}", request_id)
    return matched.group(1) if matched else request_id


def parse_remote_prefill(params: Mapping[str, Any]) -> RemotePrefill:
    """Decode's part of the parameters."""
    return RemotePrefill(_text(params, "rendezvous_id", MAX_RENDEZVOUS_ID), _text(params, "x_request_id", 512))


def parse_remote_decodes(params: Mapping[str, Any]) -> RemoteDecodes:
    """Prefill's part of the parameters. Raises nothing: a child that cannot be used is among ``broken``, alone."""
    batch = params.get(BATCH_KEY)
    entries: list[tuple[object, object]] = []
    children: list[RemoteDecode] = []
    broken: list[BrokenChild] = []
    if batch is None:
        entries = [("", params)]
    elif not isinstance(batch, dict) or not 0 < len(batch) <= MAX_CHILDREN:
        got = f"{len(batch)} children" if isinstance(batch, dict) else type(batch).__name__
        broken = [BrokenChild("", f"{BATCH_KEY} must be a map of 1..{MAX_CHILDREN} children, got {got}", None)]
    else:
        entries = list(batch.items())
    for name, entry in entries:
        try:
            children.append(_remote_decode(entry))
        except RequestError as error:
            broken.append(_broken_child(name, entry, str(error)))
    x_request_id = params.get("x_request_id")
    rendezvous_id = params.get("rendezvous_id")
    return RemoteDecodes(
        x_request_id if isinstance(x_request_id, str) else "",
        rendezvous_id if isinstance(rendezvous_id, str) and _is_text(rendezvous_id, MAX_RENDEZVOUS_ID) else "",
        tuple(children),
        tuple(broken),
    )


def _broken_child(name: object, entry: object, reason: str) -> BrokenChild:
    """What is known of a child in spite of its parameters; ``name`` is its key in the batch, its request id too."""
    known = entry if isinstance(entry, Mapping) else {}
    ids = (value for value in (known.get("request_id"), name) if isinstance(value, str) and _is_text(value, 512))
    request_id = next(ids, "")
    needed = {key: known.get(key) for key in _REACHABLE_BY}
    try:
        reachable = _remote_decode({**needed, "request_id": request_id or "unknown", "remote_engine_id": "unknown"})
    except RequestError:
        return BrokenChild(request_id, reason, None)
    return BrokenChild(request_id, reason, None if reachable.legacy else reachable)


def _remote_decode(entry: object) -> RemoteDecode:
    if not isinstance(entry, Mapping):
        raise RequestError(f"a child's parameters must be a map, got {type(entry).__name__}")
    for key in ("remote_pcp_size", "remote_dcp_size"):
        if _whole(entry, key, 1, 1 << 16, default=1) != 1:
            raise RequestError(f"{key}={entry[key]!r} is not supported, expected 1")
    token = entry.get("token")
    generation = entry.get("generation")
    if token is not None:
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise RequestError(f"token must be {2 * TOKEN_BYTES} hex digits")
        generation = _whole(entry, "generation", 1, (1 << 64) - 1)
    fingerprint = entry.get("layout_fingerprint") or ""
    if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise RequestError(f"layout_fingerprint must be hex digits, two a byte, got {fingerprint!r:.80}")
    return RemoteDecode(
        _text(entry, "request_id", 512),
        _text(entry, "remote_engine_id", 256),
        _text(entry, "remote_host", 256),
        _whole(entry, "remote_port", 1, MAX_PORT),
        _whole(entry, "remote_tp_size", 1, 1 << 16),
        _whole(entry, "remote_cached_tokens", 0, 1 << 31, default=0),
        _whole(entry, "prompt_index", 0, MAX_CHILDREN, default=0),
        _whole(entry, "prompt_tokens", 0, 1 << 31, default=0) or None,
        bytes.fromhex(token) if token is not None else None,
        generation if token is not None else None,
        bytes.fromhex(fingerprint),
    )


def _text(params: Mapping[str, Any], key: str, maximum: int) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not _is_text(value, maximum):
        raise RequestError(f"{key} must be a string of 1..{maximum} characters, got {value!r:.80}")
    return value


def _is_text(value: str, maximum: int) -> bool:
    """Whether a string has a fitting length and can be sent: JSON may carry half of a surrogate pair, UTF-8 cannot."""
    return 0 < len(value) <= maximum and (value.isascii() or _SURROGATE.search(value) is None)


def _whole(params: Mapping[str, Any], key: str, minimum: int, maximum: int, default: int | None = None) -> int:
    value = params.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise RequestError(f"{key} must be a whole number of {minimum}..{maximum}, got {value!r:.80}")
    return value
