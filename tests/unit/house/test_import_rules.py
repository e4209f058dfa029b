"""scripts/import_rules.py finds what it must find (and our own tree has none of it)."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "import_rules.py"


@pytest.fixture(scope="module")
def rules() -> ModuleType:
    spec = importlib.util.spec_from_file_location("import_rules", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_tree_obeys(rules: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code = rules.main()
    assert code == 0, capsys.readouterr().out


def test_circle_is_found(rules: ModuleType) -> None:
    assert rules.circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == [["a", "b", "c", "a"]]
    assert rules.circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_impure_import_is_found_through_another_module(rules: ModuleType) -> None:
    ours = {"rd2h.wire": {"rd2h.bytes"}, "rd2h.bytes": set()}
    tops = {"rd2h.wire": {"rd2h"}, "rd2h.bytes": {"torch"}}
    assert rules.impure_paths(ours, tops) == ["rd2h.wire is pure but rd2h.bytes imports torch"]


@pytest.mark.parametrize(
    ("source", "inside", "expected"),
    [
        ("import a.b", False, {"a.b"}),
        ("from . import x", False, {"p.q", "p.q.x"}),
        ("from .x import y", False, {"p.q.x", "p.q.x.y"}),
        ("from ..r import y", False, {"p.r", "p.r.y"}),
        ("def f():\n    import torch", False, set()),
        ("def f():\n    import torch", True, {"torch"}),
        ("if TYPE_CHECKING:\n    import torch", True, set()),
        ("try:\n    import zmq\nexcept ImportError:\n    zmq = None", False, {"zmq"}),
    ],
)
def test_imported_names(rules: ModuleType, source: str, inside: bool, expected: set[str]) -> None:
    tree = ast.parse(source)
    assert set(rules.imported(tree, "p.q.m", is_package=False, inside_functions=inside)) == expected
