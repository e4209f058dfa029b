"""Checks what may import what: the pure core stays pure, and no modules import each other in a circle.

Looks at imports that run when a module is loaded; imports inside functions and under TYPE_CHECKING are allowed to
point anywhere, except that a pure module may not hide an impure import inside a function either.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_ROOTS = {
    "rd2h": ROOT,
    "rd2h_meta": ROOT / "server",
    "rd2h_client": ROOT / "clients",
    "rd2h_proxy": ROOT / "clients",
}
# Modules, or packages with everything in them.
PURE_MODULES = (
    "rd2h.topology",
    "rd2h.wire",
    "rd2h.layout",
    "rd2h.plan",
    "rd2h.ledger",
    "rd2h.gates",
    "rd2h.children",
    "rd2h.lease",
    "rd2h.offload.residency",
    "rd2h.offload.selections",
    "rd2h.offload.config",
    "rd2h.offload.budget",
    "rd2h_meta.registry",
    "rd2h_meta.rendezvous",
)
IMPURE = frozenset({"vllm", "torch", "zmq", "grpc", "threading", "asyncio", "time", "socket", "subprocess"})
MAX_LINES = 450
FORBIDDEN_NAMES = frozenset({"utils.py", "util.py", "helpers.py", "misc.py"})


def modules() -> dict[str, Path]:
    """Maps dotted names of our modules to their files; generated stubs are left out."""
    found: dict[str, Path] = {}
    for package, root in PACKAGE_ROOTS.items():
        for path in sorted((root / package).rglob("*.py")):
            if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported(tree: ast.Module, module: str, is_package: bool, inside_functions: bool) -> Iterator[str]:
    """Yields the dotted names that a module imports; `from a import b` yields both `a` and `a.b`."""
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.stmt) and _is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, base] if base else parts)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not inside_functions:
            continue
        stack.extend(ast.iter_child_nodes(node))


def import_graph(found: dict[str, Path]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Returns (our modules imported at load time, top-level names of anything imported anywhere) per module."""
    ours: dict[str, set[str]] = {}
    tops: dict[str, set[str]] = {}
    for name, path in found.items():
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        is_package = path.name == "__init__.py"
        # `from package import module` names the package too; importing one's own package is not a circle.
        ours[name] = {
            target
            for target in imported(tree, name, is_package, inside_functions=False)
            if target in found and target != name and not name.startswith(f"{target}.")
        }
        tops[name] = {target.partition(".")[0] for target in imported(tree, name, is_package, inside_functions=True)}
    return ours, tops


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Finds import circles by depth-first search; each is a list of modules that closes on its first."""
    done: set[str] = set()
    found: list[list[str]] = []

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append([*trail[trail.index(name) :], name])
            return
        if name in done:
            return
        for target in sorted(graph[name]):
            visit(target, [*trail, name])
        done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return found


def impure_paths(ours: dict[str, set[str]], tops: dict[str, set[str]]) -> list[str]:
    """Follows the pure modules through our own modules and names every impure import they reach."""
    problems = []
    for root in sorted(ours):
        if not any(root == pure or root.startswith(f"{pure}.") for pure in PURE_MODULES):
            continue
        seen: set[str] = set()
        stack = [root]
        while stack:
            name = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            problems += [f"{root} is pure but {name} imports {top}" for top in sorted(tops[name] & IMPURE)]
            stack.extend(ours[name])
    return problems


def main() -> int:
    """Prints one line per broken rule; exit code 1 if there is any."""
    found = modules()
    ours, tops = import_graph(found)
    problems = impure_paths(ours, tops)
    problems += ["import circle: " + " -> ".join(circle) for circle in circles(ours)]
    for path in found.values():
        shown = path.relative_to(ROOT)
        if path.name in FORBIDDEN_NAMES:
            problems.append(f"{shown}: name the file after the thing it holds")
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > MAX_LINES:
            problems.append(f"{shown}: {lines} lines, at most {MAX_LINES}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
