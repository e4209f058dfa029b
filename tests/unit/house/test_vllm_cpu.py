"""The stand-in answer for the package metadata of "vllm"."""

import importlib.metadata

import pytest

from rd2h.demo import vllm_cpu
from rd2h.errors import ConfigError


def _lookup(known: dict[str, str]) -> object:
    def version(name: str) -> str:
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    return version


@pytest.mark.parametrize(("found", "answer"), [("0.32.0", "0.32.0+cpu"), ("0.32.0+cpu", "0.32.0+cpu")])
def test_answers_for_vllm(monkeypatch: pytest.MonkeyPatch, found: str, answer: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", _lookup({"vllm-cpu": found, "torch": "1"}))
    monkeypatch.delitem(vllm_cpu.sys.modules, "vllm", raising=False)
    assert vllm_cpu.answer_metadata_lookup() == answer
    assert importlib.metadata.version("vllm") == answer
    assert importlib.metadata.version("torch") == "1"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("other")


def test_leaves_a_real_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = _lookup({"vllm": "0.27.0"})
    monkeypatch.setattr(importlib.metadata, "version", lookup)
    assert vllm_cpu.answer_metadata_lookup() == "0.27.0"
    assert importlib.metadata.version is lookup


def test_missing_distribution_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", _lookup({}))
    monkeypatch.delitem(vllm_cpu.sys.modules, "vllm", raising=False)
    with pytest.raises(ConfigError, match=r"rd2h\[cpu\]"):
        vllm_cpu.answer_metadata_lookup()


def test_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", _lookup({"vllm-cpu": "0.32.0"}))
    monkeypatch.setitem(vllm_cpu.sys.modules, "vllm", object())
    with pytest.raises(ConfigError, match="before"):
        vllm_cpu.answer_metadata_lookup()
