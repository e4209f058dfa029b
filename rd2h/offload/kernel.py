"""Builds and loads the compiled kernel of residency planning; everything works without it, only slower.

The C source beside this file is built once with the system's compiler into a private cache folder and loaded with
ctypes. ``RD2H_OFFLOAD_KERNEL``: "auto" (default: NumPy when there is no compiler), "off", or "required".
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rd2h.errors import ConfigError, EngineError
from rd2h.offload.compiled import Kernel

VARIABLE = "RD2H_OFFLOAD_KERNEL"
MODES = ("auto", "off", "required")
SOURCE = Path(__file__).with_name("kernel.c")
FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
BUILD_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


@functools.cache
def load_kernel() -> Kernel | None:
    """The kernel of this process as the environment asks, or None for NumPy. Raises ConfigError, EngineError."""
    mode = os.environ.get(VARIABLE, "") or "auto"
    if mode not in MODES:
        raise ConfigError.bad_value(VARIABLE, mode, MODES)
    if mode == "off":
        return None
    try:
        return Kernel(ctypes.CDLL(str(build(cache_folder(os.environ), compiler(os.environ)))))
    except (EngineError, OSError) as error:
        if mode == "required":
            raise EngineError(f"{VARIABLE}=required, but the kernel cannot be built or loaded: {error}") from error
        logger.warning("residency planning runs in NumPy, the compiled kernel is not available: %s", error)
        return None


def compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The C compiler's command: ``$CC``, or the first of cc, gcc, clang. Raises EngineError when there is none."""
    if environ.get("CC"):
        try:
            return tuple(shlex.split(environ["CC"]))
        except ValueError as error:
            raise EngineError(f"CC={environ['CC']!r} is no command: {error}") from error
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found is not None:
            return (found,)
    raise EngineError("no C compiler found (CC is not set; cc, gcc and clang are not in PATH)")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Folder of built kernels: in ``$RD2H_CACHE``, else in the user's cache folder. Raises EngineError without a home.

    A folder of its own, because it must be private, and the one above is shared with what else is cached.
    """
    if environ.get("RD2H_CACHE"):
        return Path(environ["RD2H_CACHE"]) / "kernel"
    cache = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "rd2h" / "kernel"
    except RuntimeError as error:
        raise EngineError(f"no folder for the kernel (RD2H_CACHE is not set): {error}") from error


def build(folder: Path, command: tuple[str, ...]) -> Path:
    """Path of the built library, building it if this source has not been built here. Raises EngineError, OSError."""
    digest = hashlib.sha256("\0".join((SOURCE.read_text(), *FLAGS, *command, platform.machine())).encode()).hexdigest()
    library = folder / f"residency-{digest[:20]}.so"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if library.exists():
        _check_private(folder)
        _check_private(library)
        return library
    _check_private(folder)
    # Ranks build side by side: each into a file of its own, the last rename wins with equal bytes.
    with tempfile.TemporaryDirectory(dir=folder) as work:
        built = Path(work) / "kernel.so"
        line = [*command, *FLAGS, "-o", str(built), str(SOURCE)]
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"{shlex.join(line)}: {error}") from error
        if done.returncode:
            raise EngineError(f"{shlex.join(line)} ended with {done.returncode}: {done.stderr.strip()[:500]}")
        built.chmod(0o700)
        os.replace(built, library)
    return library


def _check_private(path: Path) -> None:
    # Whatever lies there is loaded into the engine, so nobody else may be able to put it there.
    status = path.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise EngineError(f"{path} is not owned by this user or is writable by others; refusing to load code from it")
