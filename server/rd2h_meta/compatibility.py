"""Whether a Prefill and a Decode engine can work together, decided before any prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator

from rd2h_client.v1.engine_registry_pb2 import Engine, LayerLayout, Layout

from rd2h_meta.errors import PreconditionError


class IncompatibleError(PreconditionError):
    """Two engines differ where they must agree."""

    def __init__(self, field: str, prefill: object, decode: object, rule: str = "equal on both") -> None:
        """`field` is the path in Engine; the values are those of each side."""
        super().__init__(f"{field}: prefill has {prefill!s}, decode has {decode!s}, allowed: {rule}")
        self.field = field


def check_compatible(prefill: Engine, decode: Engine) -> None:
    """Compare a Prefill with a Decode engine, both with a known layout.

    Raises:
        IncompatibleError: naming the first field that differs and both values.
    """
    if prefill.tp_size < decode.tp_size or prefill.tp_size % decode.tp_size:
        rule = "prefill a multiple of decode"
        raise IncompatibleError("tp_size", prefill.tp_size, decode.tp_size, rule)
    if prefill.layout.fingerprint and prefill.layout.fingerprint == decode.layout.fingerprint:
        return
    for field, on_prefill, on_decode in _layout_fields(prefill.layout, decode.layout):
        if on_prefill != on_decode:
            raise IncompatibleError(field, on_prefill, on_decode)
    if prefill.layout.fingerprint and decode.layout.fingerprint:
        # All fields that we know are equal, so the difference lies in what only the engines' versions know.
        raise IncompatibleError("layout.fingerprint", prefill.layout.fingerprint.hex(), decode.layout.fingerprint.hex())


def _layout_fields(prefill: Layout, decode: Layout) -> Iterator[tuple[str, object, object]]:
    """Yield (field, Prefill's value, Decode's value), the most telling fields first."""
    for name in ("wire_version", "transfer_backend", "transfer_protocol", "model", "kv_dtype", "block_size_tokens"):
        yield f"layout.{name}", getattr(prefill, name), getattr(decode, name)
    for index, layers in enumerate(zip(prefill.layers, decode.layers, strict=False)):
        yield from _layer_fields(index, *layers)
    yield "layout.layers (number)", len(prefill.layers), len(decode.layers)


def _layer_fields(index: int, prefill: LayerLayout, decode: LayerLayout) -> Iterator[tuple[str, object, object]]:
    path = f"layout.layers[{index}]"
    yield f"{path}.name", prefill.name, decode.name
    for name in ("indexer_block_bytes", "scale_block_bytes"):
        yield f"{path}.{name}", getattr(prefill, name), getattr(decode, name)
    yield f"{path}.main_block_bytes", list(prefill.main_block_bytes), list(decode.main_block_bytes)
