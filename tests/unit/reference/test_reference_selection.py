"""The indexer's arithmetic beside loops that spell it out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rd2h.reference.selection import ABSENT, dequantize, index_scores, quantize, select_topk


def obvious_topk(scores: list[float], position: int, topk: int) -> list[int]:
    seen = sorted(range(min(position + 1, len(scores))), key=lambda s: (-scores[s], s))[:topk]
    return sorted(seen) + [ABSENT] * (topk - len(seen))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=12, max_size=12), min_size=1, max_size=4),
    st.integers(1, 15),
    st.data(),
)
def test_topk_is_the_obvious_one_with_ties(scores: list[list[int]], topk: int, data: st.DataObject) -> None:
    positions = [data.draw(st.integers(0, 11)) for _ in scores]
    chosen = select_topk(torch.tensor(scores, dtype=torch.float64), torch.tensor(positions), topk)
    expected = [
        obvious_topk([float(s) for s in row], position, topk) for row, position in zip(scores, positions, strict=True)
    ]
    assert chosen.tolist() == expected


def test_future_tokens_are_never_selected_even_when_they_score_best() -> None:
    scores = torch.tensor([[-5.0, -6.0, 9.0, 9.0]], dtype=torch.float64)
    assert select_topk(scores, torch.tensor([1]), 3).tolist() == [[0, 1, ABSENT]]


def test_scores_are_the_weighted_sum_of_rectified_products() -> None:
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(3, 2, 4, dtype=torch.float64, generator=generator)
    weights = torch.randn(3, 2, dtype=torch.float64, generator=generator)
    keys = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    scores = index_scores(queries, weights, keys)
    for t in range(3):
        for s in range(5):
            products = [sum(float(queries[t, h, d] * keys[s, d]) for d in range(4)) for h in range(2)]
            expected = sum(float(weights[t, h]) * max(0.0, products[h]) for h in range(2))
            assert float(scores[t, s]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_int8_keys_are_off_by_half_a_step_at_most(scale: float) -> None:
    keys = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * scale
    steps, scales = quantize(keys)
    assert steps.dtype == torch.int8
    assert scales.dtype == torch.float16
    assert scales.shape == (64, 1)
    # The scale is rounded to float16 (2^-11), which moves the largest value by as much once more.
    bound = scales.double() * 0.5 + keys.abs().amax(1, keepdim=True) * 2**-10
    assert bool(((dequantize(steps, scales) - keys).abs() <= bound).all())


def test_a_zero_key_survives_quantization() -> None:
    steps, scales = quantize(torch.zeros(1, 8, dtype=torch.float64))
    assert dequantize(steps, scales).tolist() == [[0.0] * 8]
    assert math.isfinite(float(scales))
