"""Free TCP ports on the loopback address.

Ports come from below the kernel's ephemeral range, so that an outgoing connection cannot take one between the moment
it was found free and the moment a server binds it.
"""

import random
import socket
from collections.abc import Iterator

from rd2h.demo.lifetime import LaunchError

LOOPBACK = "127.0.0.1"
_LOWEST = 20_000
_HIGHEST = 32_000
_ATTEMPTS = 500
_handed_out: set[int] = set()


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """True when a server could bind this port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do; without it a port in TIME_WAIT counts as busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def require_free(port: int, purpose: str, host: str = LOOPBACK) -> int:
    """Returns the port. Raises LaunchError when something listens on it: a leftover server must not answer for ours."""
    if not is_free(port, host):
        raise LaunchError(f"port {port} for {purpose} is in use on {host}; expected a free port")
    return port


def free_port(count: int = 1) -> int:
    """Returns the first of `count` consecutive free ports; never the same one twice in a process."""
    for first in _candidates():
        ports = range(first, first + count)
        if not _handed_out.intersection(ports) and all(is_free(port) for port in ports):
            _handed_out.update(ports)
            return first
    raise LaunchError(f"no {count} consecutive free ports in {_LOWEST}..{_HIGHEST} after {_ATTEMPTS} attempts")


def _candidates() -> Iterator[int]:
    random_source = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        yield random_source.randrange(_LOWEST, _HIGHEST)
