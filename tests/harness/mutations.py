"""Hostile frames: valid messages with something changed."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

NUMBERS = (0, 1, -1, 127, 128, 255, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    None,
    True,
    1.5,
    "",
    b"",
    "x" * 2000,
    b"\x00" * 16,
    [],
    {},
    [[]] * 50,
    [1, "a", None],
    {"v": 1},
    {1: 2},
)


def mutated(seeds: Sequence[bytes], count: int, chance: random.Random) -> Iterator[bytes]:
    """``count`` frames: some damaged as bytes, some well-formed with another value somewhere inside."""
    for _ in range(count):
        seed = chance.choice(seeds)
        yield _damaged(seed, chance) if chance.random() < 0.5 else _altered(seed, chance)


def _damaged(payload: bytes, chance: random.Random) -> bytes:
    data = bytearray(payload)
    for _ in range(chance.randint(1, 4)):
        what = chance.randrange(5)
        place = chance.randrange(len(data) + 1)
        if what == 0 and place < len(data):
            data[place] ^= 1 << chance.randrange(8)
        elif what == 1 and place < len(data):
            data[place] = chance.randrange(256)
        elif what == 2:
            del data[place:]
        elif what == 3:
            data[place:place] = chance.randbytes(chance.randint(1, 8))
        else:
            end = min(len(data), place + chance.randint(1, 16))
            data[place:place] = data[place:end]
    return bytes(data)


def _altered(payload: bytes, chance: random.Random) -> bytes:
    try:
        value = msgpack.unpackb(payload, strict_map_key=False)
    except ValueError:
        return _damaged(payload, chance)  # the raw acknowledgement of a legacy peer
    for _ in range(chance.randint(1, 3)):
        value = _with_change(value, chance)
    return bytes(msgpack.packb(value, use_bin_type=True))


def _with_change(value: Any, chance: random.Random) -> Any:
    """Change one place: descend into containers at random, never into the tag alone."""
    if isinstance(value, list) and value and chance.random() < 0.85:
        index = chance.randrange(len(value))
        what = chance.randrange(8)
        if what == 0:
            return value[:index] + value[index + 1 :]
        if what == 1:
            return [*value[:index], chance.choice(VALUES), *value[index:]]
        if what == 2 and len(value) < 100:
            return value + value
        return [*value[:index], _with_change(value[index], chance), *value[index + 1 :]]
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        changed = dict(value)
        changed[key] = _with_change(value[key], chance)
        return changed
    if isinstance(value, bytes) and len(value) > 40 and chance.random() < 0.7:
        return _altered(value, chance)  # the layer map inside the metadata
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        number = chance.choice((value + 1, value - 1, value * 2, -value, *NUMBERS))
        return min(max(number, -(1 << 63)), (1 << 64) - 1)
    return chance.choice(VALUES)
