"""Entry point ``vllm.general_plugins``: makes our names known to vLLM, in every process, before it reads them.

``SfaRemoteD2HConnector`` is registered unless the name is taken; ``kv_connector_module_path`` has priority either way.
``MultiConnector`` keeps its owner, whose class is used wherever our connector is not among the members.
"""

import logging

from rd2h import early
from rd2h.composition.choice import CONNECTOR, MultiConnectorLoader

logger = logging.getLogger(__name__)

MODULE = "rd2h.connector"
COMPOSITE = early.COMPOSITE
LOGGER = "rd2h"
"""Above all loggers of ours in an engine: ``rd2h.client`` is one of them."""


def register() -> None:
    """Register both names, and see that settings are checked early; a second call changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    _log_like_vllm()
    try:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    except ValueError:
        owner = KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
        if owner.__module__ != MODULE:
            logger.info("rd2h: %s is already registered as %s.%s", CONNECTOR, owner.__module__, owner.__qualname__)
    # There is no public way to replace an entry.
    registry = KVConnectorFactory._registry
    load_owner = registry.get(COMPOSITE)
    if load_owner is not None and not isinstance(load_owner, MultiConnectorLoader):
        registry[COMPOSITE] = MultiConnectorLoader(load_owner)
    early.install(KVConnectorFactory)


def _log_like_vllm() -> None:
    """vLLM sets up its own loggers only: without this our information would be lost and our warnings have no form."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger(LOGGER)
    if not ours.hasHandlers():
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
