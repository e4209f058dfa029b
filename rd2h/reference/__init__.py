"""A CPU reference of a sparse-attention (DSA) model for vLLM. It shows and tests the connector; not for production.

Everything is plain PyTorch in float64 between float32 (or bfloat16) caches: the order in which a batch is cut into
chunks then changes nothing that a comparison of tokens could see. On Ascend the model, its kernels and its worker are
vLLM-Ascend's; nothing here is used there.
"""
