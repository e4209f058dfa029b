"""`python -m rd2h.demo.child PARENT_PID MODULE ARGUMENTS...`: runs a module that dies with its parent."""

import runpy
import sys

from rd2h.demo.lifetime import die_with_parent


def main() -> None:
    """Binds this process to its parent, then becomes `python -m MODULE ARGUMENTS...`."""
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent_pid)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
