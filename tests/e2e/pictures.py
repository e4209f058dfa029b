"""Pictures as parts of a chat message, written without an imaging library."""

import base64
import random
import struct
import zlib
from typing import Any


def picture(width: int, height: int, seed: int) -> dict[str, Any]:
    """An image_url part: a PNG of random colours."""
    pixels = random.Random(seed).randbytes(3 * width * height)
    lines = b"".join(b"\0" + pixels[start : start + 3 * width] for start in range(0, len(pixels), 3 * width))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines)) + _chunk(b"IEND", b"")
    return data_url(b"\x89PNG\r\n\x1a\n" + body)


def data_url(content: bytes) -> dict[str, Any]:
    """An image_url part with any content."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"}}


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
