"""Session strings of MemFabric, `host:rpc_port`: made by Prefill, hostile input on Decode."""

from __future__ import annotations

import ipaddress
import re

from rd2h.engines.options import bracketed
from rd2h.errors import SessionError

MAX_SESSION_CHARS = 280
"""A host name has at most 253 characters."""

_SESSION = re.compile(
    r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?)):([1-9][0-9]{0,4})"
)


def format_session(host: str, port: int) -> str:
    """The session of an engine reachable at `host`; IPv6 literals are bracketed."""
    return f"{bracketed(host)}:{port}"


def parse_session(text: str) -> tuple[str, int]:
    """Host (without brackets) and port of a session. Raises SessionError; wildcards are refused."""
    if len(text) > MAX_SESSION_CHARS:
        raise SessionError(f"memfabric session has {len(text)} characters; at most {MAX_SESSION_CHARS} are allowed")
    match = _SESSION.fullmatch(text)
    if match is None:
        raise SessionError(f"memfabric session {text[:48]!r} is malformed; expected host:port or [IPv6]:port")
    host = match[1] or match[2]
    port = int(match[3])
    if port > 65535:
        raise SessionError(f"memfabric session {text[:48]!r}: port {port} is out of range; expected 1..65535")
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        if match[1]:
            raise SessionError(f"memfabric session {text[:48]!r}: {host!r} is not an IPv6 address") from error
        return host, port
    if address.is_unspecified:
        raise SessionError(f"memfabric session {text[:48]!r} names a wildcard address; expected a real one")
    return host, port
