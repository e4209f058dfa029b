"""Prints a digest of everything that decides what belongs into the virtual environment."""

import hashlib
import json
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Hashes the dependency tables, the entry points, the tried versions, and the interpreter's version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    keys = ("dependencies", "optional-dependencies", "scripts", "entry-points")
    facts = {key: project.get(key) for key in keys}
    facts["constraints"] = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    facts["python"] = list(sys.version_info[:2])
    print(hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
