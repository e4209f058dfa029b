"""The only place that looks for torch_npu."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

from rd2h.errors import EngineError


def npu_device_setter() -> Callable[[int], None] | None:
    """`torch_npu.npu.set_device`, or None where torch_npu is not installed.

    Raises EngineError when it is installed and cannot be imported: reading threads without a device would fail later,
    with a far less readable text.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return None
    try:
        module = importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineError(f"torch_npu is installed but cannot be imported: {error}") from error
    setter: Callable[[int], None] = module.npu.set_device
    return setter
