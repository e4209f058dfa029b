"""Names and values of the connector's metrics, and that the documents list exactly what the code has."""

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rd2h.children import FailureKind
from rd2h.config import ConnectorConfig
from rd2h.connector import SfaRemoteD2HConnector
from rd2h.metrics import GAUGES, Rd2hPromMetrics, Rd2hStats, metric_name
from rd2h.offload.config import SparseOffloadConfig
from rd2h.stats import FAILURES, FIELDS, TransferStats, failures_of

DOCS = Path(__file__).resolve().parents[3] / "docs"
LABELS = ["model_name", "engine"]


def make(engines: int = 1) -> tuple[Rd2hPromMetrics, CollectorRegistry]:
    registry = CollectorRegistry()

    def within(kind: Any) -> Any:
        return lambda **arguments: kind(registry=registry, **arguments)

    types = {kind: within(kind) for kind in (Counter, Gauge, Histogram)}
    config: Any = type("Config", (), {"kv_transfer_config": None})()
    made = SfaRemoteD2HConnector.build_prom_metrics(
        config, types, LABELS, {engine: ["m", str(engine)] for engine in range(engines)}
    )
    return made, registry


def page(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """(sample name, with the reason if it has one, engine) -> value, without the creation times."""
    samples = {}
    for line in generate_latest(registry).decode().splitlines():
        found = re.fullmatch(r'(\w+)\{engine="(\d+)",model_name="m"(?:,reason="(\w+)")?\} (\S+)', line)
        if found and not found[1].endswith("_created"):
            name = f"{found[1]}/{found[3]}" if found[3] else found[1]
            samples[name, found[2]] = float(found[4])
    return samples


def counter_samples() -> dict[str, str]:
    """Statistics name -> sample name of every counter."""
    names = {name: f"{metric_name(name)}_total" for name in FIELDS if name != FAILURES}
    return names | {failures_of(kind): f"rd2h_children_failed_total/{kind.value}" for kind in FailureKind}


def sample_names() -> set[str]:
    return {*counter_samples().values(), *map(metric_name, GAUGES)}


def test_every_metric_exists_from_the_start_for_every_engine() -> None:
    _, registry = make(engines=2)
    assert page(registry) == {(name, engine): 0.0 for name in sample_names() for engine in "01"}


def test_counters_add_and_gauges_replace() -> None:
    metrics, registry = make(engines=2)
    for name in counter_samples():
        metrics.observe({name: 2}, 1)
        metrics.observe({name: 0.5}, 1)
    for name in GAUGES:
        metrics.observe({name: 7}, 1)
        metrics.observe({name: 3}, 1)
    metrics.observe({"of another build": 1}, 1)
    values = page(registry)
    for sample in counter_samples().values():
        assert values[sample, "1"] == 2.5
        assert values[sample, "0"] == 0
    for name in GAUGES:
        assert values[metric_name(name), "1"] == 3


def test_names_are_prometheus_names_and_distinct() -> None:
    names = [metric_name(name) for name in (*FIELDS, *GAUGES)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"rd2h_[a-z0-9_]+", name) for name in names)
    assert not any(name.endswith("_total") for name in names)


def test_statistics_sum_counters_and_keep_the_latest_gauge() -> None:
    total = Rd2hStats({"acks": 2, "reads_in_flight": 5})
    total.aggregate(Rd2hStats({"acks": 3, "bytes_read": 7, "reads_in_flight": 1}))
    assert total.reduce() == {"acks": 5, "bytes_read": 7, "reads_in_flight": 1}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_statistics_leave_what_they_were_made_of_alone() -> None:
    """vLLM hands the same dictionary to its log and to Prometheus."""
    first = {"acks": 1}
    stats = SfaRemoteD2HConnector.build_kv_connector_stats(first)
    stats.aggregate(SfaRemoteD2HConnector.build_kv_connector_stats({"acks": 2}))
    assert first == {"acks": 1}
    assert stats.to_dict() == {"acks": 3}
    assert SfaRemoteD2HConnector.build_kv_connector_stats().is_empty()


def test_a_counter_is_taken_once() -> None:
    stats = TransferStats()
    stats.add(acks=1, bytes_read=10)
    stats.add(acks=1)
    assert stats.take() == {"acks": 2, "bytes_read": 10}
    assert stats.take() == {}


def test_every_counter_that_the_code_adds_to_is_a_known_one() -> None:
    """A misspelt name would be dropped without a trace."""
    root = DOCS.parent / "rd2h"
    added: set[str] = set()
    for path in root.rglob("*.py"):
        for call in re.findall(r"stats\.add\((.*?)\)\n", path.read_text(encoding="utf-8"), re.DOTALL):
            added |= set(re.findall(r"(?<![\w.])([a-z]\w+)=", call))
    assert added
    assert added <= set(FIELDS)


# --- documents ---


def table(file: str, heading: str) -> list[list[str]]:
    """Cells of the rows of the first table under a heading."""
    text = (DOCS / file).read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.mark.parametrize(("heading", "listed"), [("Counters", FIELDS), ("Gauges", GAUGES)])
def test_document_lists_exactly_the_metrics(heading: str, listed: dict[str, str]) -> None:
    end = "_total" if heading == "Counters" else ""
    documented = {row[0].strip("`"): row[-1] for row in table("metrics.md", heading)}
    assert documented == {f"{metric_name(name)}{end}": text for name, text in listed.items()}


def test_document_lists_exactly_the_reasons() -> None:
    assert [row[0].strip("`") for row in table("metrics.md", "Reasons of failures")] == [k.value for k in FailureKind]


def shown(value: object) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case frozenset() | tuple():
            return "[]"
        case str():
            return f'"{value}"'
    return str(value)


def test_document_lists_exactly_the_settings() -> None:
    rows = {row[0].strip("`"): row[1].strip("`") for row in table("configuration.md", "Settings of the connector")}
    defaults = ConnectorConfig.parse({"transfer_backend": "host"}, {})
    names = list(ConnectorConfig.__slots__)
    expected = {name: shown(getattr(defaults, name)) for name in names}
    expected["transfer_backend"] = "required"
    assert rows == expected


def test_document_lists_exactly_the_environment_variables() -> None:
    from dataclasses import fields

    documented = {row[0].strip("`"): row[1].strip("`") for row in table("configuration.md", "Environment variables")}
    known = {entry.metadata["env"]: entry.name for entry in fields(ConnectorConfig) if entry.metadata["env"]}
    assert documented.items() >= known.items()


def test_examples_of_the_document_are_right() -> None:
    import json

    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    examples = [json.loads(found) for found in re.findall(r"--kv-transfer-config '(\{.*?\})'", text, re.DOTALL)]
    assert [example["kv_role"] for example in examples] == 2 * ["kv_producer", "kv_consumer"], "on Ascend, by hand"
    (additional,) = re.findall(r"--additional-config '(\{.*?\})'", text, re.DOTALL)
    assert SparseOffloadConfig.read(json.loads(additional)).topk_buffer_size == 4096
    members = examples[0]["kv_connector_extra_config"]["connectors"]
    for entry in (members[0], *examples[1:]):
        assert entry["kv_connector"] == "SfaRemoteD2HConnector"
        ConnectorConfig.parse(entry["kv_connector_extra_config"], {})
