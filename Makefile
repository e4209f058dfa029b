# Everything runs from a virtual environment in .venv that `make venv` builds; nothing else is needed but Python and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Extra package index for PyTorch's CPU wheels; leave empty where plain pip finds a "+cpu" torch by itself.
TORCH_INDEX ?=
VENV ?= .venv
export VENV

.PHONY: help venv demo test test-slow check format proto clean

help:
	@echo "make venv       build $(VENV) with all that demo, tests and benchmarks need"
	@echo "make demo       one completion through proxy, Decode, meta service and Prefill, checked against one engine"
	@echo "make test       unit, integration and end-to-end tests (without the slow ones)"
	@echo "make test-slow  the long runs"
	@echo "make check      format, lint, types, proto lint, import rules, generated stubs"
	@echo "make format     rewrite the sources in the house format"
	@echo "make proto      generate the gRPC stubs again"

venv:
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" scripts/venv

demo: venv
	@$(VENV)/bin/rd2h demo $(DEMO_ARGS)

test: venv
	@scripts/test $(TEST_ARGS)

test-slow: venv
	@scripts/test -m slow $(TEST_ARGS)

check: venv
	@scripts/check

format: venv
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

proto:
	@PYTHON="$(PYTHON)" scripts/proto

clean:
	rm -rf $(VENV) .venv-proto .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
