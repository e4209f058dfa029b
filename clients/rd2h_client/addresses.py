"""Addresses as text: targets of the meta service, and hosts that may be advertised to peers."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache

DEFAULT_TARGET = "grpc://127.0.0.1:7700"
"""Where tools look for a meta service that nobody has named."""
TARGET_VARIABLE = "RD2H_META_SERVICE"
"""Environment variable that names the meta service, to tools, proxy and engines alike."""

MAX_HOST_CHARACTERS = 253
MAX_PORT = 65_535

_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_WILDCARDS = frozenset({"", "*", "0", "0.0.0.0", "::", "0::0"})


class AddressError(ValueError):
    """An address is malformed; the message says what is allowed."""


@dataclass(frozen=True)
class Target:
    """Where a meta service listens."""

    host: str
    """Name or IP literal, without brackets."""
    port: int
    """1..65535."""
    secure: bool
    """True when the scheme asks for TLS."""

    @property
    def authority(self) -> str:
        """host:port with IPv6 literals in brackets."""
        return join_host_port(self.host, self.port)

    @property
    def url(self) -> str:
        """The target with its scheme."""
        return f"{'grpcs' if self.secure else 'grpc'}://{self.authority}"


def join_host_port(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 literal."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """Split "host:port", "[v6]:port" into host (without brackets) and port.

    Raises:
        AddressError: the text has another form, or the port is outside 1..65535.
    """
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]/@\s]+)):([0-9]{1,5})", text)
    if match is None:
        raise AddressError("host:port, with an IPv6 literal in brackets")
    host, port = match[1] or match[2], int(match[3])
    if not 1 <= port <= MAX_PORT:
        raise AddressError(f"a port in 1..{MAX_PORT}")
    return host, port


def parse_target(text: str) -> Target:
    """Parse "grpc://host:port", "grpcs://host:port" or "host:port".

    Raises:
        AddressError: naming the text and what is allowed.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "grpc", text
    try:
        if scheme not in ("grpc", "grpcs"):
            raise AddressError("the scheme grpc or grpcs")
        host, port = split_host_port(rest.removesuffix("/"))
        check_advertised_host(host)
    except AddressError as error:
        raise AddressError(f"meta service address: got {text[:200]!r}, allowed: {error}") from error
    return Target(host=host, port=port, secure=scheme == "grpcs")


@lru_cache(maxsize=4_096)  # the same few hosts come with every advert
def check_advertised_host(host: str) -> None:
    """Check a host that others shall connect to: a name or an IP literal without brackets, never a wildcard.

    Raises:
        AddressError: saying what is allowed.
    """
    if host in _WILDCARDS:
        raise AddressError("a name or IP literal that peers can reach, not a wildcard")
    if len(host) > MAX_HOST_CHARACTERS:
        raise AddressError(f"at most {MAX_HOST_CHARACTERS} characters")
    if ":" in host or host.replace(".", "").isdigit():
        try:
            # A zone ("fe80::1%eth0") names a local interface and means nothing to a peer.
            literal: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(host)
        except ValueError:
            raise AddressError("a name or an IP literal without brackets") from None
        if "%" in host:
            raise AddressError("an IPv6 literal without a zone")
        if isinstance(literal, ipaddress.IPv6Address) and literal.ipv4_mapped is not None:
            literal = literal.ipv4_mapped
        if literal.is_unspecified or literal.is_multicast:
            raise AddressError("a name or IP literal that peers can reach, not a wildcard or multicast address")
    elif _NAME.fullmatch(host) is None:
        raise AddressError("a host name of letters, digits, '-', '_' and '.', or an IP literal")


def is_loopback(host: str) -> bool:
    """Return True when `host` is certain to mean this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
