"""msgpack from an untrusted peer: malformed bytes become WireError, and the number of containers is bounded.

An empty list costs one byte on the wire and about sixty in memory, and every container is work for the garbage
collector, so a frame within the size limit could still cost a gigabyte. Scalars cannot be inflated like that.
"""

from collections.abc import Callable
from typing import Any

import msgpack

from rd2h.errors import WireError

MALFORMED = (ValueError, TypeError, RecursionError, MemoryError, msgpack.exceptions.UnpackException)
_SHOWN_CHARS = 40


def at_most(limit: int, what: str) -> Callable[[Any], Any]:
    """A msgpack hook that passes containers through and raises WireError after ``limit`` of them."""
    count = 0

    def hook(value: Any) -> Any:
        nonlocal count
        count += 1
        if count > limit:
            raise WireError(f"more than {limit} {what}")
        return value

    return hook


def no_extension(code: int, data: bytes) -> Any:
    """A msgpack hook: no message has extension types."""
    raise WireError(f"msgpack extension type {code} is not part of any message")


def unpack(payload: bytes, what: str, *, lists: int, maps: int, longest_list: int = -1) -> Any:
    """The one msgpack value that ``payload`` holds, with at most ``lists`` arrays and ``maps`` maps in it.

    No array may be longer than ``longest_list`` (-1: than the payload). Raises WireError, which names ``what``.
    """
    try:
        return msgpack.unpackb(
            payload,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_array_len=longest_list,
            ext_hook=no_extension,
            list_hook=at_most(lists, f"lists in {what}"),
            object_hook=at_most(maps, f"maps in {what}"),
        )
    except MALFORMED as error:
        raise WireError(f"{what} is malformed: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """What msgpack found wrong, in a few words."""
    return f"{type(error).__name__} {error!s:.120}".strip()


def shown(value: object) -> str:
    """A received value for an error message: short, and without walking containers, which may be nested too deep."""
    if isinstance(value, str | bytes):
        return repr(value[:_SHOWN_CHARS])
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return type(value).__name__
