"""The cores stay pure: no gRPC, no event loop, no thread."""

import subprocess
import sys

CORES = "rd2h_meta.registry, rd2h_meta.rendezvous, rd2h_meta.compatibility, rd2h_meta.validation"


def test_cores_import_neither_grpc_nor_asyncio() -> None:
    program = f"import sys, {CORES}; print([n for n in ('grpc', 'asyncio') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_client_package_loads_without_grpc_until_a_client_is_wanted() -> None:
    program = (
        "import sys, rd2h_client, rd2h_client.kv_params; before = 'grpc' in sys.modules\n"
        "from rd2h_client import MetaClient; print(before, 'grpc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
