"""Entry point ``vllm.general_plugins``: makes the connector known to vLLM under its name."""

import logging

logger = logging.getLogger(__name__)

CONNECTOR = "SfaRemoteD2HConnector"
MODULE = "rd2h.connector"


def register() -> None:
    """Register the connector unless the name is taken; ``kv_connector_module_path`` has priority either way."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    except ValueError:
        owner = KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
        logger.info("%s is already registered as %s.%s", CONNECTOR, owner.__module__, owner.__qualname__)
