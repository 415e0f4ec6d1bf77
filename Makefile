# `make demo` measures, `make test` checks; both set up .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NPROC ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the locked versions

# The stamp depends on what decides the environment: a second call touches no network.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "scaling needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[deepspeed,dev]'
	@touch $@
	@echo 'ready: . $(VENV)/bin/activate'

demo: setup ## measure gpt_tiny as single and as DDP on 1 and 2 ranks, and report (three minutes)
	@launch/demo.sh

test: setup lint ## lint, types and the whole test suite
	$(BIN)/python -m pytest

lint: setup ## ruff, ruff format and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## what the suite itself costs: per step, and against a bare DDP loop
	$(BIN)/python tests/bench/overhead.py --nproc $(NPROC)

clean: ## remove the environment and the caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
