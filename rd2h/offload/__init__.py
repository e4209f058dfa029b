"""Sparse offload on Decode: main KV in a host pool, a small hot buffer on the device, top-k misses copied each step."""
