"""Every wrong setting is one line that names the key, the value and what is allowed; every right one is taken."""

import os
from pathlib import Path
from typing import Any

import pytest

from rd2h import startup
from rd2h.config import ConnectorConfig
from rd2h.errors import ConfigError, TopologyError

HOST: dict[str, Any] = {"transfer_backend": "host"}


def parse(environment: dict[str, str] | None = None, **extra: Any) -> ConnectorConfig:
    return ConnectorConfig.parse({**HOST, **extra}, environment or {})


def one_line(error: pytest.ExceptionInfo[ConfigError], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 1500
    for part in parts:
        assert part in text, text


# --- transfer backend and protocol ---


@pytest.mark.parametrize("extra", [{}, {"transfer_backend": None}])
def test_transfer_backend_is_required(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        ConnectorConfig.parse(extra, {})
    one_line(error, "transfer_backend=None is not allowed; expected one of 'memfabric', 'host'")


@pytest.mark.parametrize("value", ["memfabrik", "HOST", "", "null", 1, True, ["host"], {"a": 1}])
def test_transfer_backend_values(value: object) -> None:
    with pytest.raises(ConfigError) as error:
        ConnectorConfig.parse({"transfer_backend": value}, {})
    one_line(error, f"transfer_backend={value!r} is not allowed; expected one of 'memfabric', 'host'")
    assert error.value.key == "transfer_backend"


@pytest.mark.parametrize("value", ["SDMA", "rdma", "device_rdma ", 1, False])
def test_memfabric_protocol_values(value: object) -> None:
    with pytest.raises(ConfigError) as error:
        ConnectorConfig.parse({"transfer_backend": "memfabric", "memfabric_transfer_protocol": value}, {})
    one_line(error, f"memfabric_transfer_protocol={value!r} is not allowed", "'sdma', 'device_rdma', 'device_urma'")


@pytest.mark.parametrize("value", ["sdma", "device_rdma", "device_urma"])
def test_memfabric_protocols(value: str) -> None:
    config = ConnectorConfig.parse({"transfer_backend": "memfabric", "memfabric_transfer_protocol": value}, {})
    assert config.memfabric_transfer_protocol == value
    assert ConnectorConfig.parse({"transfer_backend": "memfabric"}, {}).memfabric_transfer_protocol == "sdma"


# --- keys and types ---


@pytest.mark.parametrize("key", ["transfer_backends", "Transfer_backend", "metaserver", "backend", "kv_port", ""])
def test_unknown_key(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**{key: 7})
    one_line(error, f"kv_connector_extra_config.{key}=7 is not allowed; expected known keys", "'transfer_backend'")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("use_layerwise", "true", "true or false"),
        ("use_layerwise", 1, "true or false"),
        ("require_registered_prefill", 0, "true or false"),
        ("require_registered_decode", "no", "true or false"),
        ("legacy_decode_hosts", "10.0.0.1", "a list of host addresses"),
        ("debug_suppress_reads", 1, "true or false"),
        ("peer_timeout_s", "20", "a positive number of seconds"),
        ("peer_timeout_s", 0, "a positive number of seconds"),
        ("peer_timeout_s", -1.5, "a positive number of seconds"),
        ("peer_timeout_s", True, "a positive number of seconds"),
        ("peer_timeout_s", float("nan"), "a positive number of seconds"),
        ("peer_timeout_s", float("inf"), "a positive number of seconds"),
        ("connect_timeout_s", 0, "a positive number of seconds"),
        ("handshake_timeout_s", [1], "a positive number of seconds"),
        ("park_timeout_s", "5s", "a positive number of seconds"),
        ("idle_timeout_s", 0, "a positive number of seconds"),
        ("hold_s", -1, "a number of seconds, 0 or more"),
        ("hold_s", "0", "a number of seconds, 0 or more"),
        ("read_threads", 0, "a whole number of 1..65536"),
        ("read_threads", 2.0, "a whole number of 1..65536"),
        ("read_threads", True, "a whole number of 1..65536"),
        ("max_connections", 65537, "a whole number of 1..65536"),
        ("prefill_tp_size", 0, "a whole number of 1..65536"),
        ("decode_tp_size", "2", "a whole number of 1..65536"),
        ("legacy_prefill_hosts", "10.0.0.1", "a list of host addresses"),
        ("legacy_prefill_hosts", [1], "a list of host addresses"),
        ("legacy_prefill_hosts", [""], "a list of host addresses"),
        ("memfabric_store_url", "10.0.0.1:6000", "tcp://host or tcp://host:port"),
        ("memfabric_store_url", "http://a", "tcp://host or tcp://host:port"),
        ("memfabric_store_url", 6000, "a string"),
    ],
)
def test_wrong_type_or_value(key: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**{key: value})
    one_line(error, f"{key}={value!r} is not allowed; expected {allowed}")
    assert error.value.key == key


def test_long_and_hostile_values_stay_one_short_line() -> None:
    for value in ("a\nb" * 1000, ["x"] * 100000, {"k": "\x00\n"}):
        with pytest.raises(ConfigError) as error:
            parse(peer_timeout_s=value)
        one_line(error, "peer_timeout_s=")


def test_a_token_never_shows_in_an_error() -> None:
    for value in (8123456789, "hush\nhush", ["hush"]):
        with pytest.raises(ConfigError) as error:
            parse(meta_token=value)
        one_line(error, "meta_token is not allowed; expected a string")
        assert "hush" not in str(error.value)
        assert "8123456789" not in str(error.value)


# --- addresses ---


@pytest.mark.parametrize("value", ["0.0.0.0", "::", "[::]", "*", "0", "0::0", "0:0:0:0:0:0:0:0", "::0"])
def test_wildcard_is_not_advertised(value: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(advertise_host=value)
    one_line(error, f"advertise_host={value!r} is not allowed; expected", "not a wildcard")


@pytest.mark.parametrize(
    "value", ["", "a b", "http://a", "10.0.0.1:80", "a/b", "user@a", "fe80::1%eth0", "10.0.0", "999.1.1.1", 7, "a\nb"]
)
def test_malformed_host_is_not_advertised(value: object) -> None:
    with pytest.raises(ConfigError) as error:
        parse(advertise_host=value)
    one_line(error, "advertise_host=")


@pytest.mark.parametrize(
    ("value", "host"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("decode-0.decode.svc", "decode-0.decode.svc"),
        ("fd00::5", "fd00::5"),
        ("[fd00::5]", "fd00::5"),
    ],
)
def test_advertised_hosts(value: str, host: str) -> None:
    assert parse(advertise_host=value).advertise_host == host


@pytest.mark.parametrize(
    ("value", "host"),
    [("0.0.0.0", "0.0.0.0"), ("*", "0.0.0.0"), ("::", "::"), ("[::]", "::"), ("10.0.0.1", "10.0.0.1")],
)
def test_a_wildcard_may_be_listened_on(value: str, host: str) -> None:
    assert parse(bind_host=value).bind_host == host


@pytest.mark.parametrize(
    "value",
    [
        "10.0.0.1:50051",
        "http://a:1",
        "grpc://",
        "grpc://a",
        "grpc://a:0",
        "grpc://a:65536",
        "grpc://a:x",
        "grpc://0.0.0.0:1",
        "grpc://[::]:1",
        "grpc://fd00::5:1",
        "grpc://u@a:1",
        "grpc://a:1/path",
        7,
    ],
)
def test_malformed_meta_service(value: object) -> None:
    with pytest.raises(ConfigError) as error:
        parse(meta_service=value)
    one_line(error, f"meta_service={value!r} is not allowed; expected")


@pytest.mark.parametrize("value", ["grpc://a:50051", "grpcs://meta.svc:443", "grpc://[fd00::5]:1"])
def test_meta_services(value: str) -> None:
    assert parse(meta_service=value).meta_service == value


@pytest.mark.parametrize("value", ["a", "http://a:1", "0.0.0.0:8000", "a:99999"])
def test_malformed_http_address(value: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(http_address=value)
    one_line(error, f"http_address={value!r} is not allowed; expected host:port")


# --- credentials ---


def test_credentials_must_be_readable_files(tmp_path: Path) -> None:
    missing = str(tmp_path / "ca.pem")
    with pytest.raises(ConfigError) as error:
        parse(meta_ca=missing)
    one_line(error, "meta_ca=", "is not allowed; expected a readable file")
    (tmp_path / "ca.pem").write_text("x")
    assert parse(meta_ca=missing).meta_ca == missing
    for half in ("meta_cert", "meta_key"):
        with pytest.raises(ConfigError, match="meta_cert and meta_key must be given together"):
            parse(**{half: missing})


# --- environment ---


def test_environment_fills_what_the_settings_leave_out() -> None:
    environment = {"RD2H_META_SERVICE": "grpc://env:1", "RD2H_ADVERTISE_HOST": "10.0.0.9", "RD2H_META_TOKEN": ""}
    config = parse(environment)
    assert (config.meta_service, config.advertise_host, config.meta_token) == ("grpc://env:1", "10.0.0.9", None)
    assert parse(environment, meta_service="grpc://set:2").meta_service == "grpc://set:2"


def test_error_names_the_environment_variable() -> None:
    with pytest.raises(ConfigError) as error:
        parse({"RD2H_ADVERTISE_HOST": "0.0.0.0"})
    one_line(error, "advertise_host (from RD2H_ADVERTISE_HOST)='0.0.0.0' is not allowed")


# --- rules that need the engine ---


@pytest.mark.parametrize("role", ["kv_both", None, "", "producer"])
def test_one_role_only(role: object) -> None:
    with pytest.raises(ConfigError) as error:
        startup.is_producer(role)
    one_line(error, f"kv_role={role!r} is not allowed; expected one of 'kv_producer', 'kv_consumer'")


@pytest.mark.parametrize("found", ["0.0.0.0", "::"])
def test_host_that_vllm_found_must_be_reachable(found: str) -> None:
    with pytest.raises(ConfigError) as error:
        startup.reachable_host(parse(), found)
    one_line(error, "advertise_host (from VLLM_HOST_IP", f"={found!r} is not allowed")
    assert startup.reachable_host(parse(advertise_host="10.0.0.1"), found) == "10.0.0.1"


@pytest.mark.parametrize(
    ("kv_port", "dp_rank", "dp_size", "tp_size", "base"),
    [
        (20050, 0, 1, 1, 20050),
        (20050, 3, 4, 2, 20056),
        (65535, 0, 1, 1, 65535),
        (65528, 3, 4, 2, 65534),
        (1, 0, 1, 1, 1),
    ],
)
def test_decode_ports(kv_port: int, dp_rank: int, dp_size: int, tp_size: int, base: int) -> None:
    assert startup.decode_base_port(kv_port, dp_rank, dp_size, tp_size) == base


@pytest.mark.parametrize(
    ("kv_port", "dp_rank", "dp_size", "tp_size", "highest"),
    [
        (65536, 0, 1, 1, 65535),
        (65535, 0, 1, 2, 65534),
        (65529, 0, 4, 2, 65528),  # rank 0 fits, the highest rank does not
        (65534, 1, 1, 2, 65532),  # global rank 1 although this engine believes itself alone
        (0, 0, 1, 1, 65535),
        (-5, 0, 1, 1, 65535),
    ],
)
def test_ports_beyond_the_range(kv_port: int, dp_rank: int, dp_size: int, tp_size: int, highest: int) -> None:
    with pytest.raises(TopologyError) as error:
        startup.decode_base_port(kv_port, dp_rank, dp_size, tp_size)
    one_line(error, f"kv_port={kv_port} is not allowed; expected 1..{highest}", f"tensor-parallel size {tp_size}")


@pytest.mark.parametrize(
    ("producer", "own", "settings", "parts"),
    [
        (True, 3, {"decode_tp_size": 2}, ("decode_tp_size=2", "a divisor of 3", "size 3", "size 2")),
        (True, 2, {"decode_tp_size": 4}, ("decode_tp_size=4", "a divisor of 2")),
        (False, 2, {"prefill_tp_size": 3}, ("prefill_tp_size=3", "a multiple of 2")),
        (False, 4, {"prefill_tp_size": 2}, ("prefill_tp_size=2", "a multiple of 4")),
        (True, 2, {"prefill_tp_size": 4}, ("prefill_tp_size=4", "tensor-parallel size 2")),
        (False, 2, {"decode_tp_size": 1}, ("decode_tp_size=1", "tensor-parallel size 2")),
    ],
)
def test_tensor_parallel_sizes_must_pair(
    producer: bool, own: int, settings: dict[str, int], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        startup.check_pairing(parse(**settings), producer, own)
    one_line(error, *parts)


def test_tensor_parallel_sizes_that_pair() -> None:
    startup.check_pairing(parse(prefill_tp_size=8, decode_tp_size=2), True, 8)
    startup.check_pairing(parse(prefill_tp_size=8, decode_tp_size=2), False, 2)
    startup.check_pairing(parse(), True, 3)


def offload(enabled: object) -> dict[str, Any]:
    return {"sparse_kv_offload_config": {"enabled": enabled, "topk_buffer_size": 4096}}


def check_side(additional: Any, producer: bool, sparse_on_npu: bool = False, load_failure_policy: str = "fail") -> None:
    enabled = startup.offload_enabled(additional)
    startup.check_offload_side(enabled, producer, sparse_on_npu=sparse_on_npu)
    startup.check_load_failures(load_failure_policy, producer=producer, siblings=False, offload=enabled)


def test_sparse_offload_on_the_wrong_side() -> None:
    with pytest.raises(ConfigError) as error:
        check_side(offload(True), producer=True)
    one_line(error, "additional_config.sparse_kv_offload_config.enabled=True is not allowed", "kv_producer")
    with pytest.raises(ConfigError) as error:
        check_side({}, producer=False, sparse_on_npu=True)
    one_line(error, "additional_config.sparse_kv_offload_config.enabled=False is not allowed", "true on Decode")


def test_sparse_offload_on_the_right_side() -> None:
    check_side(offload(True), producer=False, sparse_on_npu=True)
    check_side(offload(False), producer=True)
    check_side({}, producer=True, sparse_on_npu=True)
    check_side(None, producer=False)
    check_side(object(), producer=False)


def test_a_pool_cannot_be_computed_anew() -> None:
    with pytest.raises(ConfigError) as error:
        check_side(offload(True), producer=False, load_failure_policy="recompute")
    one_line(error, "kv_load_failure_policy='recompute' is not allowed; expected 'fail' with sparse offload")
    check_side({}, producer=False, load_failure_policy="recompute")


@pytest.mark.parametrize(
    ("value", "sets"), [([3], ({3},)), ([3, 5], ({3, 5},)), ([[3], [5, 6]], ({3}, {5, 6})), ([[0]], ({0},))]
)
def test_processors_for_all_ranks_or_for_each(value: object, sets: tuple[set[int], ...]) -> None:
    assert parse(data_path_cpus=value).data_path_cpus == sets
    assert parse().data_path_cpus == ()


@pytest.mark.parametrize("value", [[], [[]], [[1], []], [True], [-1], ["0"], "0", 0, [[1], 2], {"0": 1}, [1 << 20]])
def test_malformed_processors_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"data_path_cpus=.*a list of processor numbers"):
        parse(data_path_cpus=value)


def test_processors_are_counted_and_looked_up_by_rank() -> None:
    usable = min(os.sched_getaffinity(0))
    for value, tp_size in (([usable], 4), ([[usable]], 2), ([[usable], [usable]], 2)):
        config = parse(data_path_cpus=value)
        startup.check_processors(config, tp_size)
        assert [config.cpus_of(rank) for rank in range(tp_size)] == [{usable}] * tp_size
    with pytest.raises(ConfigError, match=r"data_path_cpus='2 lists'.*each of the 4 tensor-parallel ranks"):
        startup.check_processors(parse(data_path_cpus=[[usable], [usable]]), 4)
    with pytest.raises(ConfigError, match=r"data_path_cpus=.*not \[60000\]"):
        startup.check_processors(parse(data_path_cpus=[60000]), 1)
    assert parse().cpus_of(3) == frozenset()
    startup.check_processors(parse(), 8)
