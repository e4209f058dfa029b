"""Stands where the memfabric_hybrid wheel would, so that call sequences can be checked on a machine without a driver.

Only for what lies behind the boundary; test_memfabric_wheel.py compares its signatures with the installed wheel's.
"""

import enum
import types


class TransDataOpType(enum.IntEnum):
    SDMA = 1
    HOST_RDMA = 2
    DEVICE_RDMA = 8
    DEVICE_URMA = 64
    DEVICE_UBOE = 128


def make_module(**results):
    """A module object that records calls in `.calls`; `results` maps call names to what they return or raise."""
    module = types.ModuleType("memfabric_hybrid")
    module.calls = []
    module.results = results

    def outcome(name, default, *args):
        module.calls.append((name, *args))
        result = results.get(name, default)
        if isinstance(result, BaseException):
            raise result
        return result(*args) if callable(result) else result

    class TransferEngine:
        def __init__(self):
            outcome("TransferEngine", None)

        def initialize(
            self,
            store_url,
            session_id,
            role,
            device_id,
            data_op_type=TransDataOpType.SDMA,
            store_server_role="Decode",
            nic="",
        ):
            return outcome(
                "initialize", 0, store_url, session_id, role, device_id, data_op_type, store_server_role, nic
            )

        def get_rpc_port(self):
            return outcome("get_rpc_port", 15001)

        def register_memory(self, buffer_addr, capacity):
            return outcome("register_memory", 0, buffer_addr, capacity)

        def unregister_memory(self, buffer_addr):
            return outcome("unregister_memory", 0, buffer_addr)

        def batch_transfer_sync_read(self, dest_session, buffers, peer_buffers, lengths, flags=0):
            return outcome("batch_transfer_sync_read", 0, dest_session, buffers, peer_buffers, lengths, flags)

        def destroy(self):
            return outcome("destroy", None)

        def unInitialize(self):  # noqa: N802 - the wheel's name
            return outcome("unInitialize", None)

    module.TransferEngine = TransferEngine
    module.TransDataOpType = TransDataOpType
    module.set_log_level = lambda level: outcome("set_log_level", 0, level)
    module.set_conf_store_tls = lambda enable, tls_info: outcome("set_conf_store_tls", 0, enable, tls_info)
    module.set_conf_store_tls_key = lambda tls_pk, tls_pk_pw, py_decrypt_func: outcome(
        "set_conf_store_tls_key", None, tls_pk, tls_pk_pw, py_decrypt_func("x")
    )
    return module
