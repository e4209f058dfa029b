"""Which class the names ``SfaRemoteD2HConnector`` and ``MultiConnector`` stand for, through vLLM's own factory."""

from collections.abc import Callable
from typing import Any

import pytest
from standin_connectors import RecordingConnector
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from rd2h.composition.choice import members_that_are_ours
from rd2h.composition.multi_connector import MultiConnector
from rd2h.connector import SfaRemoteD2HConnector
from rd2h.errors import ConfigError
from rd2h.plugin import register

OURS = {
    "kv_connector": "SfaRemoteD2HConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"transfer_backend": "host", "advertise_host": "127.0.0.1"},
}
OTHER = {"kv_connector": "Recording", "kv_role": "kv_producer"}


def composite(*members: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": list(members)},
    }


@pytest.fixture(autouse=True)
def _other(registry: dict[str, Any]) -> None:
    registry["Recording"] = lambda: RecordingConnector


def create(config: Any, caches: Any) -> Any:
    return KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)


@pytest.mark.parametrize("members", [(OURS, OTHER), (OTHER, OURS), (OURS,)])
def test_composite_is_ours_where_our_connector_is_a_member(
    members: tuple[dict[str, Any], ...],
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "rd2h")
    made = create(engine_config(composite(*members)), cache_config())
    assert type(made) is MultiConnector
    assert [type(member) for member in made.sub_connectors] == [
        SfaRemoteD2HConnector if member is OURS else RecordingConnector for member in members
    ]
    assert "MultiConnector is rd2h.composition.multi_connector.MultiConnector" in caplog.text


@pytest.mark.parametrize("members", [(OTHER,), (OTHER, {**OTHER, "kv_role": "kv_both"})])
def test_composite_is_vllms_elsewhere(
    members: tuple[dict[str, Any], ...], engine_config: Callable[..., Any], cache_config: Callable[..., Any]
) -> None:
    made = create(engine_config(composite(*members)), cache_config())
    assert type(made) is multi_connector.MultiConnector


def test_vllms_class_is_untouched_and_its_class_methods_serve_both(registry: dict[str, Any]) -> None:
    chosen = registry["MultiConnector"]()
    assert issubclass(chosen, multi_connector.MultiConnector)
    assert chosen is not multi_connector.MultiConnector
    assert set(vars(chosen)) - {"__module__", "__doc__", "__new__", "_abc_impl", "__abstractmethods__"} == set()


def test_registering_twice_changes_nothing(registry: dict[str, Any]) -> None:
    before = dict(registry)
    register()
    assert registry == before


def test_taken_name_is_left_to_its_owner_and_logged(
    registry: dict[str, Any],
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another package's connector of our name is not ours: the composite stays as it was, unless a module path says."""
    registry["SfaRemoteD2HConnector"] = lambda: RecordingConnector
    caplog.set_level("INFO", "rd2h")
    register()
    assert "already registered as standin_connectors.RecordingConnector" in caplog.text
    theirs = create(engine_config(composite(OURS)), cache_config())
    assert type(theirs) is multi_connector.MultiConnector
    by_path = {**OURS, "kv_connector_module_path": "rd2h.connector"}
    assert type(create(engine_config(composite(by_path)), cache_config())) is MultiConnector


def test_owner_of_the_composites_name_stays_the_owner(
    registry: dict[str, Any], engine_config: Callable[..., Any], cache_config: Callable[..., Any]
) -> None:
    """A platform's own composite is what configurations without our connector get."""

    class PlatformComposite(multi_connector.MultiConnector):
        pass

    registry["MultiConnector"] = lambda: PlatformComposite
    register()
    assert type(create(engine_config(composite(OTHER)), cache_config())) is PlatformComposite
    assert type(create(engine_config(composite(OURS, OTHER)), cache_config())) is MultiConnector


def test_two_of_ours_are_one_too_many(engine_config: Callable[..., Any], cache_config: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.connectors has 2 members SfaRemoteD2HConnector"):
        create(engine_config(composite(OURS, OURS)), cache_config())


@pytest.mark.parametrize("extra", [None, {}, {"connectors": None}, {"connectors": {}}, {"connectors": [None, 3, "x"]}])
def test_malformed_member_lists_are_not_ours(extra: dict[str, Any] | None, registry: dict[str, Any]) -> None:
    assert members_that_are_ours(extra) == []


def test_hybrid_cache_groups_need_every_member(
    registry: dict[str, Any], engine_config: Callable[..., Any], cache_config: Callable[..., Any]
) -> None:
    config = engine_config(composite(OURS, OTHER))
    assert KVConnectorFactory.supports_hma_config(config.kv_transfer_config)
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False


def test_per_layer_hooks_ask_for_piecewise_graphs(registry: dict[str, Any]) -> None:
    chosen = registry["MultiConnector"]()
    assert chosen.requires_piecewise_for_cudagraph({"connectors": [OTHER, OURS]})
    assert not chosen.requires_piecewise_for_cudagraph({"connectors": [OTHER]})
