"""Where pulled KV goes on Decode: the addresses of this rank's layers, and who owns main."""

from dataclasses import dataclass

from rd2h.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class Destination:
    """Local memory of one Decode rank.

    ``split_main`` is false for Decode's own paged cache (every rank pulls all of main) and true for a host pool that
    the TP ranks share (each rank pulls a disjoint share). Block ids from vLLM index ``layout`` directly.
    """

    layout: CacheLayout
    d_rank: int
    d_tp: int
    split_main: bool
