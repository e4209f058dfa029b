"""The small parts of the demo: ports, counters, timeline, cases, verdict, engine command line."""

import json
import socket
from pathlib import Path

import pytest

from rd2h.demo.cases import Case, control_cases, equality_cases
from rd2h.demo.counters import Counters
from rd2h.demo.engine_spec import EngineSpec
from rd2h.demo.lifetime import LaunchError
from rd2h.demo.ports import free_port, is_free, require_free
from rd2h.demo.timeline import Event, TimelineFile, pulled_bytes, render
from rd2h.demo.verdict import Verdict
from rd2h.errors import Rd2hError

PAGE = """\
# HELP tokens_total words
# TYPE tokens_total counter
tokens_total{engine="0",source="local"} 7.0
tokens_total{engine="1",source="local"} 5
tokens_total{engine="0",source="re\\"mote"} 1e3
plain 2.5
"""


class TestPorts:
    def test_busy_port_is_refused(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert not is_free(port)
            with pytest.raises(LaunchError, match=rf"port {port} for engine x is in use"):
                require_free(port, "engine x")

    def test_never_the_same_port_twice(self) -> None:
        ports = [free_port() for _ in range(50)]
        assert len(set(ports)) == 50

    def test_consecutive_ports_do_not_overlap(self) -> None:
        first, second = free_port(4), free_port(4)
        assert not set(range(first, first + 4)) & set(range(second, second + 4))


class TestCounters:
    def test_sums_over_matching_labels(self) -> None:
        page = Counters.parse(PAGE)
        assert page.total("tokens_total", source="local") == 12
        assert page.total("tokens_total") == 1012
        assert page.total("plain") == 2.5

    def test_absent_counter_is_an_error(self) -> None:
        with pytest.raises(Rd2hError, match="no tokens_total with"):
            Counters.parse(PAGE).total("tokens_total", source="other")


class TestTimeline:
    def test_follows_a_growing_file_and_leaves_half_lines(self, tmp_path: Path) -> None:
        file = TimelineFile(tmp_path / "t.jsonl")
        assert file.new_events() == []
        first = json.dumps({"t": 1.0, "role": "D", "event": "advertise", "request": "r"})
        second = json.dumps({"t": 2.0, "role": "D", "event": "layer_read", "layer": 3, "bytes": 10})
        file.path.write_text(f"{first}\n{second[:7]}", encoding="utf-8")
        assert file.new_events() == [Event(1.0, "D", "advertise", "r")]
        with file.path.open("a", encoding="utf-8") as handle:
            handle.write(second[7:] + "\n")
        assert file.new_events() == [Event(2.0, "D", "layer_read", layer=3, bytes=10)]
        assert file.new_events() == []

    def test_sums_only_reads(self) -> None:
        events = [Event(0, "D", "layer_read", bytes=5), Event(0, "P", "ready_sent", bytes=9)]
        assert pulled_bytes(events) == 5

    def test_renders_in_order_of_time(self) -> None:
        lines = render([Event(2.0, "D", "layer_read", layer=0, bytes=1234), Event(1.5, "P", "rendezvous", "r")], 1.0)
        assert [line.split() for line in lines] == [
            ["500.0", "ms", "P", "rendezvous", "r"],
            ["1000.0", "ms", "D", "layer_read", "layer", "0", "1,234", "bytes"],
        ]


class TestCases:
    def test_blocks_count_every_choice(self) -> None:
        assert Case("c", ("a" * 16, "a" * 17), choices=2).prompt_blocks(16) == 6

    def test_names_say_what_the_prompts_are(self) -> None:
        cases = {case.name: case for case in equality_cases(256)}
        assert len(cases["exactly one block"].prompts[0]) == 16
        assert len(cases["one block and one token"].prompts[0]) == 17
        assert len(cases["773 tokens in chunks of 256"].prompts[0]) == 773
        assert cases["5 prompts, 2 choices each"].children == 10

    def test_prompts_are_ascii_and_unshared_where_they_must_be(self) -> None:
        prompts = [p for case in (*equality_cases(256), *control_cases(256)) for p in case.prompts]
        assert all(prompt.isascii() for prompt in prompts)
        seen = equality_cases(256)
        for case in control_cases(256):
            for prompt in case.prompts:
                assert len(prompt) > 1
                assert all(prompt[:16] != other[:16] for known in seen for other in known.prompts)


class TestVerdict:
    def test_nothing_checked_is_a_failure(self) -> None:
        assert Verdict().exit_code == 1

    def test_one_failure_fails_and_is_named(self) -> None:
        verdict = Verdict()
        verdict.add("a", True, "")
        assert verdict.exit_code == 0
        verdict.add("b", False, "because")
        assert verdict.exit_code == 1
        assert verdict.lines() == ["  failed: b: because", "VERDICT: 1 of 2 checks do not hold"]


class TestEngineSpec:
    def test_ordinary_engine_has_no_connector(self) -> None:
        assert "--kv-transfer-config" not in EngineSpec("e", Path("m")).arguments(8000)

    def test_connector_configuration(self) -> None:
        spec = EngineSpec("d", Path("m"), "kv_consumer", {"transfer_backend": "host"}, kv_port=21000)
        arguments = spec.arguments(8000)
        assert json.loads(arguments[arguments.index("--kv-transfer-config") + 1]) == {
            "kv_connector": "SfaRemoteD2HConnector",
            "kv_connector_module_path": "rd2h.connector",
            "kv_role": "kv_consumer",
            "engine_id": "d",
            "kv_port": 21000,
            "kv_connector_extra_config": {"transfer_backend": "host"},
        }

    def test_rotary_embedding_is_not_a_custom_op(self) -> None:
        arguments = EngineSpec("e", Path("m")).arguments(8000)
        compilation = json.loads(arguments[arguments.index("--compilation-config") + 1])
        assert compilation == {"custom_ops": ["all", "-rotary_embedding"]}
