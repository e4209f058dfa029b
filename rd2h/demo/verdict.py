"""Collects what the demo checked and says whether all of it held."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """One thing that must hold."""

    name: str
    ok: bool
    detail: str


@dataclass
class Verdict:
    """All checks of a run; an empty verdict is a failure, since nothing was shown."""

    checks: list[Check] = field(default_factory=list)

    def add(self, name: str, ok: bool, detail: str) -> Check:
        """Records a check and returns it."""
        check = Check(name, ok, detail)
        self.checks.append(check)
        return check

    @property
    def ok(self) -> bool:
        """True when something was checked and all of it held."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0 when everything held, else 1."""
        return 0 if self.ok else 1

    def lines(self) -> list[str]:
        """The summary that the demo ends with."""
        failed = [check for check in self.checks if not check.ok]
        if self.ok:
            return [f"VERDICT: all {len(self.checks)} checks hold"]
        lines = [f"  failed: {check.name}: {check.detail}" for check in failed]
        return [*lines, f"VERDICT: {len(failed)} of {len(self.checks)} checks do not hold"]
