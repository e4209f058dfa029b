"""The installed memfabric_hybrid wheel: its signatures and enum members are the ones that the engine calls.

The wheel is imported in a process of its own: importing it loads native libraries for good.
"""

import inspect
import json
import re
import subprocess
import sys

import memfabric_stand_in
import pytest

from rd2h.engines import MemfabricProtocol
from rd2h.engines.memfabric_native import PROTOCOL_MEMBERS

REPORT = """
import json, memfabric_hybrid as wheel
names = [name for name in dir(wheel.TransferEngine) if not name.startswith("__") or name == "__init__"]
functions = ["set_log_level", "set_conf_store_tls", "set_conf_store_tls_key", "create_config_store"]
print("REPORT" + json.dumps({
    "methods": {name: getattr(wheel.TransferEngine, name).__doc__ for name in names},
    "functions": {name: getattr(wheel, name).__doc__ for name in functions},
    "op_types": {name: int(value) for name, value in wheel.TransDataOpType.__members__.items()},
}))
"""


@pytest.fixture(scope="module")
def wheel():
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout.partition("REPORT")[2])


def parameters(doc):
    """Names and defaults of a pybind signature line, without self."""
    inside = re.match(r"\w+\((.*)\) -> ", doc.strip().splitlines()[0])[1]
    found = re.findall(r"(?:^|, )(\w+): [^=]*?(?:\[[^\]]*\])?[^,=]*(?: = (<[^>]*>|'[^']*'|\d+))?(?=, \w+: |$)", inside)
    return [(name, default) for name, default in found if name != "self"]


def test_op_types(wheel):
    assert set(PROTOCOL_MEMBERS) == set(MemfabricProtocol)
    assert {wheel["op_types"][member] for member in PROTOCOL_MEMBERS.values()} == {1, 8, 64}
    assert wheel["op_types"] == {member.name: member.value for member in memfabric_stand_in.TransDataOpType}


@pytest.mark.parametrize(
    "method",
    [
        "initialize",
        "get_rpc_port",
        "register_memory",
        "unregister_memory",
        "batch_transfer_sync_read",
        "destroy",
        "unInitialize",
    ],
)
def test_methods_have_the_signature_that_the_stand_in_has(wheel, method):
    stand_in = inspect.signature(getattr(memfabric_stand_in.make_module().TransferEngine, method))
    ours = [name for name in stand_in.parameters if name != "self"]
    theirs = parameters(wheel["methods"][method])
    assert [name for name, _ in theirs] == ours
    required = [name for name in ours if stand_in.parameters[name].default is inspect.Parameter.empty]
    assert [name for name, default in theirs if not default] == required


def test_the_parser_of_signatures_sees_types_and_defaults(wheel):
    assert parameters(wheel["methods"]["initialize"]) == [
        ("store_url", ""),
        ("session_id", ""),
        ("role", ""),
        ("device_id", ""),
        ("data_op_type", "<TransDataOpType.SDMA: 1>"),
        ("store_server_role", "'Decode'"),
        ("nic", "''"),
    ]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("set_log_level", ["level"]),
        ("set_conf_store_tls", ["enable", "tls_info"]),
        ("set_conf_store_tls_key", ["tls_pk", "tls_pk_pw", "py_decrypt_func"]),
    ],
)
def test_functions_have_the_signature_that_we_call(wheel, function, names):
    assert [name for name, _ in parameters(wheel["functions"][function])] == names


def test_results_are_integers_that_we_may_compare_with_zero(wheel):
    for method in ("initialize", "register_memory", "unregister_memory", "batch_transfer_sync_read", "get_rpc_port"):
        assert wheel["methods"][method].strip().splitlines()[0].endswith("-> int")
