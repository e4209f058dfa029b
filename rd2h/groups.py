"""Which of vLLM's KV cache groups hold main and which the indexer, whatever their order."""

from collections.abc import Sequence
from dataclasses import dataclass

from rd2h.errors import LayoutError
from rd2h.layout import is_indexer_name


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """Positions of the groups in vLLM's block-id tuples; ``indexer`` equals ``main`` when they share block ids."""

    main: int
    indexer: int
    block_size_tokens: int

    def ids(self, block_ids: Sequence[Sequence[int]]) -> tuple[Sequence[int], Sequence[int]]:
        """(main ids, indexer ids) of a request's block-id tuple."""
        return block_ids[self.main], block_ids[self.indexer]


def infer_groups(layer_names: Sequence[Sequence[str]], block_sizes: Sequence[int]) -> CacheGroups:
    """Find the groups from the layer names and block sizes (tokens) of each group. Raises LayoutError."""
    mains = [i for i, names in enumerate(layer_names) if any(not is_indexer_name(name) for name in names)]
    indexers = [i for i, names in enumerate(layer_names) if any(is_indexer_name(name) for name in names)]
    if len(mains) != 1 or len(indexers) > 1:
        raise LayoutError(
            f"expected one KV cache group with main layers and at most one with indexers, got {len(mains)} and "
            f"{len(indexers)}"
        )
    main = mains[0]
    indexer = indexers[0] if indexers else main
    if block_sizes[main] != block_sizes[indexer]:
        raise LayoutError(
            f"main has blocks of {block_sizes[main]} tokens, the indexer of {block_sizes[indexer]}; they must be equal"
        )
    return CacheGroups(main, indexer, block_sizes[main])
