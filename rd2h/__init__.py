"""rd2h: pull KV cache from a remote Prefill device into Decode's host memory, layer by layer."""

__version__ = "0.1.0"
