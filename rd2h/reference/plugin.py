"""Entry point ``vllm.general_plugins``: makes the reference model known to vLLM and to transformers."""

from rd2h.reference.config import ARCHITECTURE, MODEL_TYPE, ReferenceDsaConfig


def register() -> None:
    """Register model and configuration; a second call changes nothing."""
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry

    AutoConfig.register(MODEL_TYPE, ReferenceDsaConfig, exist_ok=True)
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"rd2h.reference.model:{ARCHITECTURE}")
