"""A Prefill process under remote control, for tests of the host engine: a JSON command and a JSON answer a line."""

import ctypes
import json
import os
import sys
import time

import numpy as np

from rd2h.engines import EngineRole, MemoryRegion, create_engine
from rd2h.engines.proof import process_identity
from rd2h.probing.pattern import pattern_bytes

PR_SET_DUMPABLE = 4
PROT_NONE, PROT_READ_WRITE = 0, 3
MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def answer(**fields):
    print(json.dumps(fields), flush=True)


def main():
    settings = json.loads(sys.argv[1])
    # Before a change of user: the new one may not be able to read the modules.
    engine = create_engine("host")
    if settings.get("uid"):
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])
    if "dumpable" in settings:
        # After a change of user the kernel makes a process undumpable; ordinary daemons start as their user.
        libc.prctl(PR_SET_DUMPABLE, settings["dumpable"], 0, 0, 0)
    size = settings["size"]
    # Raw mmap: Python must not touch pages that a command unmaps.
    addr = libc.mmap(None, size, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(addr))
    for start, length in settings["filled"]:
        memory[start : start + length] = pattern_bytes(settings["seed"], start, length)
    engine.initialize(EngineRole.PREFILL)
    engine.register_memory([MemoryRegion(addr, size)])
    answer(session=engine.session(), addr=addr, pid=os.getpid())
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "close":
                engine.close()
                answer(done=True)
            case "unmap":
                answer(done=libc.munmap(addr + command["start"], command["length"]) == 0)
            case "fork":
                child = os.fork()
                if child == 0:
                    time.sleep(600)
                    os._exit(0)
                answer(pid=child, ticks=process_identity(child).start_ticks)
            case "exec":
                # The new program says "ready" once it runs: from then on the old memory is gone.
                code = "import sys; print('{\"done\": true}', flush=True); sys.stdin.read()"
                os.execv(sys.executable, [sys.executable, "-S", "-c", code])
            case "quit":
                return


if __name__ == "__main__":
    main()
