"""Attention in latent space equals ordinary attention over expanded keys and values of the selected tokens."""

import torch

from rd2h.reference.batch import SparseBatch
from rd2h.reference.caches import ROWS_AT_ONCE, IndexerCache, PagedMain
from rd2h.reference.selection import ABSENT
from rd2h.reference.sparse_attention import attend

HEADS, RANK, ROPE, NOPE, VALUE = 2, 12, 4, 6, 5
SCALE = 0.3


def randoms(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_latent_attention_is_attention_over_expanded_keys_and_values() -> None:
    latents, ropes = randoms(1, 9, RANK), randoms(2, 9, ROPE)
    to_key, to_value = randoms(3, HEADS, NOPE, RANK), randoms(4, HEADS, VALUE, RANK)
    query, rope_query = randoms(5, HEADS, NOPE), randoms(6, HEADS, ROPE)
    selected = [0, 3, 4, 8]
    context = attend(
        torch.einsum("hn,hnr->hr", query, to_key)[None],
        rope_query[None],
        latents[selected][None],
        ropes[selected][None],
        torch.ones(1, 4, dtype=torch.bool),
        SCALE,
    )
    got = torch.einsum("hr,hvr->hv", context[0], to_value)
    for head in range(HEADS):
        keys = torch.cat((latents[selected] @ to_key[head].T, ropes[selected]), dim=1)
        values = latents[selected] @ to_value[head].T
        weights = torch.softmax(keys @ torch.cat((query[head], rope_query[head])) * SCALE, dim=0)
        torch.testing.assert_close(got[head], weights @ values)


def test_absent_rows_do_not_matter_even_when_they_are_not_numbers() -> None:
    keys, ropes = randoms(1, 1, 4, RANK), randoms(2, 1, 4, ROPE)
    present = torch.tensor([[True, True, False, False]])
    queries = randoms(3, 1, HEADS, RANK), randoms(4, 1, HEADS, ROPE)
    expected = attend(*queries, keys[:, :2], ropes[:, :2], present[:, :2], SCALE)
    keys[:, 2:], ropes[:, 2:] = torch.nan, torch.inf
    torch.testing.assert_close(attend(*queries, keys, ropes, present, SCALE), expected)


def batch_of(lengths: list[tuple[int, int]], block_size: int, num_blocks: int) -> SparseBatch:
    """(computed, scheduled) tokens per request; blocks are handed out from the end, so no table is the identity."""
    free = list(range(num_blocks - 1, 0, -1))
    tables = torch.zeros(len(lengths), 64, dtype=torch.int32)
    starts, slots = [0], []
    for row, (computed, scheduled) in enumerate(lengths):
        blocks = [free.pop(0) for _ in range(-(-(computed + scheduled) // block_size))]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        starts.append(starts[-1] + scheduled)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(computed, computed + scheduled)]
    seq_lens = torch.tensor([computed + scheduled for computed, scheduled in lengths])
    return SparseBatch.of(torch.tensor(starts), seq_lens, tables, torch.tensor(slots))


def test_paged_store_attends_each_request_to_its_own_tokens() -> None:
    block_size, num_blocks = 4, 40
    store = PagedMain()
    store.bind(
        torch.full((num_blocks, block_size, RANK), torch.nan), torch.full((num_blocks, block_size, ROPE), torch.nan)
    )
    batch = batch_of([(0, 9), (0, 1), (0, 17)], block_size, num_blocks)
    latents, ropes = randoms(1, 27, RANK).float(), randoms(2, 27, ROPE).float()
    store.append(batch, latents.double(), ropes.double())
    topk = torch.tensor([[p, max(p - 3, ABSENT), ABSENT] for p in batch.positions.tolist()])
    queries = randoms(3, 27, HEADS, RANK), randoms(4, 27, HEADS, ROPE)
    got = store.attend(batch, *queries, topk, SCALE)
    for token in range(27):
        first = int(batch.query_starts[batch.token_requests[token]])
        chosen = [first + p for p in topk[token].tolist() if p >= 0]
        expected = attend(
            queries[0][token, None],
            queries[1][token, None],
            latents[chosen][None],
            ropes[chosen][None],
            torch.ones(1, len(chosen), dtype=torch.bool),
            SCALE,
        )
        torch.testing.assert_close(got[token], expected[0])


def test_long_chunks_are_cut_without_a_trace() -> None:
    block_size, tokens = 16, 2 * ROWS_AT_ONCE + 7
    batch = batch_of([(0, tokens)], block_size, 64)
    cache = IndexerCache()
    cache.bind(torch.zeros(64, block_size, 8, dtype=torch.float64))
    cache.append(batch, randoms(1, tokens, 8))
    queries, weights = randoms(2, tokens, 3, 8), randoms(3, tokens, 3)
    whole = cache.select(batch, queries, weights, 6)
    assert whole.shape == (tokens, 6)
    for token in (0, 5, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, tokens - 1):
        one = batch_of([(token, 1)], block_size, 64)
        same_blocks = SparseBatch.of(one.query_starts, one.seq_lens, batch.block_tables, one.slots)
        got = cache.select(same_blocks, queries[token, None], weights[token, None], 6)
        assert got.tolist() == [whole[token].tolist()]


def test_int8_indexer_reads_back_what_it_stored() -> None:
    batch = batch_of([(0, 5), (0, 3)], 4, 16)
    cache = IndexerCache()
    cache.bind(torch.zeros(16, 4, 8, dtype=torch.int8), torch.zeros(16, 4, 1, dtype=torch.float16))
    keys = randoms(1, 8, 8)
    cache.append(batch, keys)
    # A query along a key scores best at that key.
    chosen = cache.select(batch, keys[:, None, :] * 10, torch.ones(8, 1, dtype=torch.float64), 1)
    own = torch.arange(8) - batch.query_starts[:-1][batch.token_requests]
    norms = [keys[i] @ keys[: i + 1].T if i < 5 else keys[i] @ keys[5 : i + 1].T for i in range(8)]
    assert chosen[:, 0].tolist() == [int(n.argmax()) for n in norms]
    assert bool((chosen[:, 0] <= own).all())
