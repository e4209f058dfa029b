"""Every block of a chunk has exactly one owner, every Prefill rank one Decode rank, every rank one port."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rd2h.errors import ConfigError, TopologyError
from rd2h.topology import MAX_PORT, TpMapping, base_port, rank_port, share_of


@pytest.mark.parametrize("parts", range(1, 9))
def test_shares_are_disjoint_and_complete(parts: int) -> None:
    for num_blocks, start in itertools.product(range(65), range(9)):
        shares = [share_of(start, num_blocks, parts, index) for index in range(parts)]
        assert sorted(block for share in shares for block in share) == list(range(num_blocks))
        lengths = {len(share) for share in shares}
        assert max(lengths) - min(lengths) <= 1, "shares of one chunk differ by one block at most"
        assert all(share.step == 1 for share in shares)


@pytest.mark.parametrize("d_tp", range(1, 9))
@pytest.mark.parametrize("ratio", range(1, 9))
def test_main_and_indexer_shares_over_all_ranks(d_tp: int, ratio: int) -> None:
    """As all ranks together see one chunk: main once over the pool, the indexer once on each Decode rank."""
    mapping = TpMapping.of(d_tp * ratio, d_tp)
    for num_blocks, start in itertools.product((0, 1, 2, 3, 7, 8, 31, 64), range(9)):
        main = [0] * num_blocks
        indexer = [[0] * num_blocks for _ in range(d_tp)]
        for p_rank in range(d_tp * ratio):
            d_rank, member = mapping.decode_rank(p_rank), mapping.member(p_rank)
            if member == 0:
                for block in share_of(start, num_blocks, d_tp, d_rank):
                    main[block] += 1
            for block in share_of(start, num_blocks, ratio, member):
                indexer[d_rank][block] += 1
        assert main == [1] * num_blocks
        assert indexer == [[1] * num_blocks] * d_tp


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 100_000), st.integers(1, 64))
def test_shares_of_any_size(num_blocks: int, start: int, parts: int) -> None:
    covered = sorted(
        (share.start, share.stop) for i in range(parts) if (share := share_of(start, num_blocks, parts, i))
    )
    assert [begin for begin, _ in covered] == [0, *(stop for _, stop in covered)][: len(covered)]
    assert sum(stop - begin for begin, stop in covered) == num_blocks


@pytest.mark.parametrize("parts", range(2, 9))
def test_small_chunks_take_turns(parts: int) -> None:
    """A prompt that comes in chunks of one block loads every rank equally."""
    owners = [next(index for index in range(parts) if share_of(start, 1, parts, index)) for start in range(parts)]
    assert sorted(owners) == list(range(parts))


@pytest.mark.parametrize("d_tp", range(1, 9))
@pytest.mark.parametrize("ratio", range(1, 9))
def test_every_prefill_rank_is_one_member_of_one_decode_rank(d_tp: int, ratio: int) -> None:
    mapping = TpMapping.of(d_tp * ratio, d_tp)
    assert mapping.ratio == ratio
    pairs = [(mapping.decode_rank(rank), mapping.member(rank)) for rank in range(d_tp * ratio)]
    assert pairs == list(itertools.product(range(d_tp), range(ratio)))


@pytest.mark.parametrize(
    ("p_tp", "d_tp"), [(2, 4), (3, 2), (0, 1), (1, 0), (0, 0), (-1, 1), (4, -2), (8, 3), (1.0, 1), ("2", 1), (None, 2)]
)
def test_sizes_that_do_not_fit_name_both_numbers(p_tp: int, d_tp: int) -> None:
    with pytest.raises(TopologyError) as raised:
        TpMapping.of(p_tp, d_tp)
    assert repr(p_tp) in str(raised.value)
    assert repr(d_tp) in str(raised.value)
    assert isinstance(raised.value, ConfigError)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(True, 1), (2, True)])
def test_a_boolean_is_no_size(p_tp: int, d_tp: int) -> None:
    with pytest.raises(TopologyError, match="True"):
        TpMapping.of(p_tp, d_tp)


@settings(deadline=None)
@given(st.integers(-10, 70_000), st.integers(0, 300), st.integers(1, 64))
def test_base_port_accepts_exactly_what_fits(kv_port: int, dp_rank: int, tp_size: int) -> None:
    ports = [kv_port + dp_rank * tp_size + rank for rank in range(tp_size)]
    if all(1 <= port <= MAX_PORT for port in ports):
        base = base_port(kv_port, dp_rank, tp_size)
        assert [rank_port(base, rank) for rank in range(tp_size)] == ports
    else:
        with pytest.raises(TopologyError, match=f"{ports[0]}..{ports[-1]}") as raised:
            base_port(kv_port, dp_rank, tp_size)
        assert f"kv_port {kv_port}" in str(raised.value)
        assert f"1..{MAX_PORT}" in str(raised.value)


@pytest.mark.parametrize("tp_size", [1, 2, 3, 8])
def test_global_data_parallel_ranks_never_share_a_port(tp_size: int) -> None:
    ports = [rank_port(base_port(20050, dp_rank, tp_size), rank) for dp_rank in range(16) for rank in range(tp_size)]
    assert len(set(ports)) == len(ports)


def test_highest_ports() -> None:
    assert base_port(65528, 0, 8) == 65528
    assert rank_port(65528, 7) == MAX_PORT
    with pytest.raises(TopologyError, match=r"65529\.\.65536"):
        base_port(65529, 0, 8)
    with pytest.raises(TopologyError, match=r"65529 \+ Decode rank 7 = 65536"):
        rank_port(65529, 7)
    for base in (-5, 0):
        with pytest.raises(TopologyError, match="outside 1"):
            rank_port(base, 0)
