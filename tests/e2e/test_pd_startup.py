"""A wrong connector configuration ends a real engine's start with one line that says what is wrong."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from rd2h.demo.engine_spec import EngineSpec
from rd2h.demo.launcher import Launcher
from rd2h.demo.lifetime import LaunchError
from rd2h.demo.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(200)]
GOOD: Mapping[str, object] = {"transfer_backend": "host", "advertise_host": "127.0.0.1"}


@pytest.mark.parametrize(
    ("extra", "kv_port", "words"),
    [
        ({"advertise_host": "127.0.0.1"}, None, ["transfer_backend=None", "'memfabric', 'host'"]),
        (GOOD | {"transfer_backend": "nixl"}, None, ["transfer_backend='nixl'", "'memfabric', 'host'"]),
        (GOOD | {"peer_timout_s": 3}, None, ["peer_timout_s=3", "peer_timeout_s"]),
        (GOOD | {"use_layerwise": "yes"}, None, ["use_layerwise='yes'", "true or false"]),
        (GOOD | {"advertise_host": "0.0.0.0"}, None, ["advertise_host='0.0.0.0'", "a wildcard"]),
        (GOOD, 70_000, ["kv_port=70000", "1..65535"]),
    ],
    ids=["missing backend", "unknown backend", "unknown key", "wrong type", "wildcard", "port range"],
)
def test_one_line_names_key_value_and_what_is_allowed(
    extra: Mapping[str, object], kv_port: int | None, words: list[str], launcher: Launcher, tiny_model: Path
) -> None:
    port = free_port() if kv_port is None else kv_port
    spec = EngineSpec(f"misconfigured-{port}", tiny_model, "kv_consumer", extra, kv_config={"kv_port": port})
    engine = launcher.start_engine(spec)
    with pytest.raises(LaunchError):
        engine.wait_ready(60)
    lines = engine.log_path.read_text(encoding="utf-8").splitlines()
    assert any("rd2h.errors." in line and all(word in line for word in words) for line in lines), lines[-20:]
