"""Every rule of ``sparse_kv_offload_config``, and the memory arithmetic."""

from fractions import Fraction

import pytest

from rd2h.errors import ConfigError
from rd2h.offload.budget import (
    Budget,
    check_dram,
    decode_rows,
    host_to_device_ratio,
    hot_buffer_bytes,
    needed_host_bytes,
    plan_budget,
)
from rd2h.offload.config import SparseOffloadConfig

GIB = 1 << 30
ENGINE = {"index_topk": 2048, "block_size": 128, "kv_role": "kv_consumer", "main_dtype": "bfloat16"}


def section(**settings):
    return {"sparse_kv_offload_config": {"enabled": True, **settings}}


def test_the_settings_of_the_guide():
    settings = section(topk_buffer_size=4096, dram_size_per_dp_GB=128)
    config = SparseOffloadConfig.parse(settings, **ENGINE)
    assert config.enabled
    assert config.topk_buffer_size == 4096
    assert config.dram_bytes == 128 * GIB
    assert not config.keep_device_kv_cache
    assert SparseOffloadConfig.parse(section(), **ENGINE) == config


@pytest.mark.parametrize(
    "settings", [None, {}, {"other": 1}, {"sparse_kv_offload_config": {"enabled": False}}, object()]
)
def test_off_asks_nothing_of_the_engine(settings):
    config = SparseOffloadConfig.parse(settings, index_topk=None, kv_role="kv_producer", pipeline_parallel_size=4)
    assert not config.enabled


@pytest.mark.parametrize(
    ("settings", "engine", "message"),
    [
        ({}, {"compress_ratios": True}, "models with compress_ratios are not supported"),
        ({}, {"index_topk": None}, "the model has no index_topk; only sparse-attention models can offload"),
        ({}, {"index_topk": 0}, "the model has no index_topk"),
        ({}, {"context_parallel_size": 2}, "context parallel size 2 is not supported; it must be 1"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline parallel size 2 is not supported; it must be 1"),
        ({}, {"kv_role": "kv_producer"}, "kv_role='kv_producer': only a Decode engine (kv_consumer) can offload"),
        ({}, {"kv_role": "kv_both"}, "kv_role='kv_both': only a Decode engine"),
        ({}, {"model_runner_v2": True}, "needs model runner V1; V2 is not supported"),
        ({"topk_buffer_size": 0}, {}, "topk_buffer_size=0 is not allowed; expected a whole number >= 1"),
        ({"topk_buffer_size": -1}, {}, "topk_buffer_size=-1 is not allowed"),
        ({"topk_buffer_size": True}, {}, "topk_buffer_size=True is not allowed"),
        ({"topk_buffer_size": 4096.0}, {}, "topk_buffer_size=4096.0 is not allowed"),
        ({"topk_buffer_size": 2047}, {}, "topk_buffer_size=2047 is not allowed; expected at least index_topk=2048"),
        ({"topk_buffer_size": 2049}, {}, "topk_buffer_size=2049 is not allowed; expected a multiple of block_size=128"),
        ({}, {"main_dtype": "float16"}, "main KV dtype='float16' is not allowed; expected one of 'bfloat16'"),
        ({}, {"num_kv_heads": 8}, "num_kv_heads 8 is not supported; it must be 1"),
        ({}, {"cache_groups": 2}, "number of KV cache groups 2 is not supported; it must be 1"),
        ({"dram_size_per_dp_GB": 0}, {}, "dram_size_per_dp_GB=0 is not allowed; expected GiB, a whole number >= 1"),
        ({"dram_size_per_dp_GB": "128"}, {}, "dram_size_per_dp_GB='128' is not allowed"),
        ({"keep_device_kv_cache": 1}, {}, "keep_device_kv_cache=1 is not allowed; expected true or false"),
        ({"enabled": "yes"}, {}, "enabled='yes' is not allowed; expected true or false"),
        ({"topk": 2048}, {}, "sparse_kv_offload_config.topk=2048 is not allowed; expected known keys"),
    ],
)
def test_every_rule_is_one_line(settings, engine, message):
    with pytest.raises(ConfigError) as raised:
        SparseOffloadConfig.parse(section(**settings), **{**ENGINE, **engine})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("flag", ["enable_sparse_sfa_c8", "enable_dsa_cp"])
def test_flags_that_exclude_offload(flag):
    SparseOffloadConfig.parse({**section(), flag: False, "enable_sparse_li_c8": True}, **ENGINE)
    with pytest.raises(ConfigError, match=f"^{flag}=True cannot be combined with sparse_kv_offload_config.enabled$"):
        SparseOffloadConfig.parse({**section(), flag: True}, **ENGINE)


def test_a_section_that_is_no_map():
    with pytest.raises(ConfigError, match="sparse_kv_offload_config=True is not allowed; expected a map"):
        SparseOffloadConfig.parse({"sparse_kv_offload_config": True}, **ENGINE)


def test_the_debugging_option_warns_and_lifts_the_role_rule(caplog):
    config = SparseOffloadConfig.parse(section(keep_device_kv_cache=True), **{**ENGINE, "kv_role": "kv_both"})
    assert config.keep_device_kv_cache
    assert "for debugging" in caplog.text


def test_other_dtypes_where_the_backend_takes_them():
    engine = {**ENGINE, "main_dtype": "float32"}
    assert SparseOffloadConfig.parse(section(), **engine, supported_dtypes=("bfloat16", "float32")).enabled


# --- arithmetic ---


@pytest.mark.parametrize(
    ("main", "device", "ratio"),
    [
        ([576 * 2], [128 * 2], 4.5),
        ([576 * 2] * 4, [128 * 2], 18),
        ([576 * 2] * 4, [128 + 2], 35.446),
    ],
)
def test_host_bytes_for_each_device_byte(main, device, ratio):
    assert round(float(host_to_device_ratio(main, device)), 3) == ratio


@pytest.mark.parametrize(("main", "device"), [([1152], []), ([1152], [0]), ([], [256])])
def test_no_ratio_without_pages(main, device):
    with pytest.raises(ConfigError, match="both must be positive"):
        host_to_device_ratio(main, device)


def test_needed_host_bytes_are_exact_and_rounded_up():
    assert needed_host_bytes(10 * GIB, Fraction(9, 2)) == 45 * GIB
    assert needed_host_bytes(3, Fraction(1, 2)) == 2
    assert needed_host_bytes(2**60 + 1, Fraction(35446, 1000)) == -(-(2**60 + 1) * 35446 // 1000)


def config(dram_gib=128, **settings):
    return SparseOffloadConfig(enabled=True, dram_size_per_dp_gib=dram_gib, **settings)


def test_blocks_follow_from_the_indexer_alone():
    main, device = [128 * 1152] * 8, [128 * 256] * 8
    budget = plan_budget(config(), 10 * GIB, main, device)
    assert budget.num_blocks == 10 * GIB // sum(device)
    assert budget.total_bytes // (sum(main) + sum(device)) == budget.num_blocks
    assert budget.host_bytes == 45 * GIB
    less = plan_budget(config(), 10 * GIB, main, device, hot_bytes=GIB)
    assert less.num_blocks == 9 * GIB // sum(device)


def test_the_debugging_option_wins_no_blocks():
    main, device = [128 * 1152] * 8, [128 * 256] * 8
    budget = plan_budget(config(keep_device_kv_cache=True), 10 * GIB, main, device)
    blocks = 10 * GIB // (sum(main) + sum(device))
    assert budget == Budget(10 * GIB, blocks * sum(main), blocks, 10 * GIB)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("available", [5_000, 123_457, 10**9 + 7, 10 * GIB])
@pytest.mark.parametrize(("main", "device"), [([1152], [256]), ([1152] * 61, [132] * 16), ([7, 11], [3])])
def test_vllms_division_gives_the_blocks_that_fit(keep, available, main, device):
    """vLLM divides by the bytes of a block wherever they lie."""
    budget = plan_budget(config(512, keep_device_kv_cache=keep), available, main, device)
    assert budget.total_bytes // (sum(main) + sum(device)) == budget.num_blocks
    on_device = sum(device) + keep * sum(main)
    assert budget.num_blocks * on_device <= available < (budget.num_blocks + 1) * on_device
    assert budget.host_bytes >= budget.num_blocks * sum(main)


def test_too_little_host_memory_names_both_numbers():
    main, device = [128 * 1152] * 8, [128 * 256] * 8
    blocks = 10 * GIB // sum(device)
    with pytest.raises(ConfigError) as raised:
        plan_budget(config(44), 10 * GIB, main, device)
    assert f"needs {blocks * sum(main)} bytes" in str(raised.value)
    assert f"allowed are {44 * GIB} bytes" in str(raised.value)
    plan_budget(config(45), 10 * GIB, main, device)


def test_hot_buffers_larger_than_the_device_name_both_numbers():
    with pytest.raises(ConfigError, match=f"hot buffers need {2 * GIB} bytes, {GIB} bytes"):
        plan_budget(config(), GIB, [1152], [256], hot_bytes=2 * GIB)


def test_check_dram_allows_the_last_byte():
    check_dram(config(1), GIB)
    with pytest.raises(ConfigError, match=f"dram_size_per_dp_GB=1 is too small: main KV needs {GIB + 1} bytes"):
        check_dram(config(1), GIB + 1)


def test_rows_and_hot_buffer():
    assert decode_rows(256, 32, 3) == 128
    assert decode_rows(100, 32, 3) == 100
    assert decode_rows(256, 32) == 32
    assert hot_buffer_bytes(1, 4096, 512, 64, 2) == 4.5 * 2**20
