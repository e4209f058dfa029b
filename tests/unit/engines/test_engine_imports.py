"""Engines are light to import: nothing heavy or native before `initialize`."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
import rd2h.engines, rd2h.engines.host, rd2h.engines.memfabric, rd2h.engines.null, rd2h.probe
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_importing_every_engine_loads_neither_torch_nor_native_wheels():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(json.loads(done.stdout))
    assert "numpy" in loaded
    assert not loaded & {"torch", "torch_npu", "vllm", "memfabric_hybrid", "zmq", "grpc"}
