# SPDX-License-Identifier: Apache-2.0
# Each target works from a clean clone with nothing done before, and does only what is missing. Nothing runs in parallel
# but what says so: targets share one environment.
# Everything of Python goes into an environment of this folder's own; `make PYTHON=python3.12 …` chooses its Python.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?=
BENCHMARK_ARGS ?=

MAKEFLAGS += --no-print-directory
SHELL := /bin/bash

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"

PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)
# Folders too: their time changes when a file comes or goes.
CORE_SOURCES := $(shell find src -type d) $(shell find src commlib -name '*.[ch]pp' -o -name '*.h' -o -name '*.p[xy][xd]' -o -name exports.map)
CXX_FILES = $(shell find src tests examples -name '*.[ch]pp' -o -name '*.[ch]')
SHELL_SCRIPTS := .ci/run tests/lab/netlab tools/system_packages

.NOTPARALLEL:
.PHONY: help demo test lint format wheel bench soak clean core
.DEFAULT_GOAL := help

help: ## What can be made
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo '  PYTHON=python3.12 chooses a Python, PYTEST_ARGS="-k name" tests, BENCH_ARGS="-n 4" what is measured,'
	@echo '  BENCHMARK_ARGS=--quick less of it'

demo: $(VENV)/.demo ## Train a small network in two processes
	$(IN_VENV) commlib run -n 2 -- python examples/torch_digits.py

# More tests at once than there are CPUs: most of the time of most of them is spent waiting.
test: $(VENV)/.test ## All tests but the long ones
	@tools/system_packages
	$(MAKE) -C tests/native check
	$(IN_VENV) python -m pytest --numprocesses 3 $(PYTEST_ARGS)

lint: $(VENV)/.lint ## Everything that can be seen without running the code
	@failed=0; export $(IN_VENV); run() { echo "$$1 $$2"; "$$@" || failed=1; }; \
	run ruff check .; \
	run ruff format --check .; \
	run mypy; \
	run stubtest --mypy-config-file pyproject.toml commlib._core; \
	run cython-lint commlib; \
	run clang-format --dry-run -Werror $(CXX_FILES); \
	run shellcheck $(SHELL_SCRIPTS); \
	exit $$failed

format: $(VENV)/.lint ## Lay out all sources as `make lint` wants them
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

wheel: $(VENV)/.lint ## Source distribution and wheel, in dist/
	rm -rf dist
	PIP_CONSTRAINT="$(CURDIR)/constraints.txt" LDFLAGS="$(LDFLAGS) -Wl,--strip-debug" $(BIN)/python -m build --outdir dist

# Some minutes; between hosts only for root, who alone can make them.
bench: $(VENV)/.bench ## Measure it on this machine beside others, into benchmarks/results/
	$(IN_VENV) commlib bench $(BENCH_ARGS)
	@mkdir -p benchmarks/results; failed=0; export $(IN_VENV); \
	for name in local many_tensors scaling network overlap optimizer_step tensorflow_step idle; do \
	  case $$name in network|overlap) [ "$$(id -u)" -eq 0 ] || { echo "not measured: $$name needs root"; continue; };; esac; \
	  echo; echo "python benchmarks/$$name.py $(BENCHMARK_ARGS)"; \
	  python benchmarks/$$name.py $(BENCHMARK_ARGS) \
	    --json benchmarks/results/$$name.json --png benchmarks/results/$$name.png || failed=1; \
	done; exit $$failed

soak: $(VENV)/.test ## The tests that run for minutes
	@tools/system_packages
	$(MAKE) -C tests/native TEST_TIMEOUT=1800 check-all
	$(IN_VENV) python -m pytest -m soak -o faulthandler_timeout=0 --timeout=3600 $(PYTEST_ARGS)

clean: ## Remove everything that was made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf commlib/include commlib/_core*.so commlib/_core.cpp
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	$(MAKE) -C tests/native clean

core: $(VENV)/.core ## commlib itself, installed so that changes of Python files need no more

# The environment is made anew when another Python is asked for.
$(VENV)/.python-$(PYTHON_VERSION):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "commlib needs Python 3.11 or newer; '$(PYTHON)' is $(or $(PYTHON_VERSION),not one). Try make PYTHON=python3.12"; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Without build isolation: the tools are pinned and installed once, and only what has changed is compiled.
$(VENV)/.core: $(VENV)/.python-$(PYTHON_VERSION) pyproject.toml setup.py constraints.txt $(CORE_SOURCES)
	$(PIP) setuptools cython
	$(PIP) --no-build-isolation --editable .
	@touch $@

# Somebody else may have removed the module from the source tree.
ifeq ($(wildcard commlib/_core*.so),)
.PHONY: $(VENV)/.core
endif

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.core
	$(PIP) numpy torch scikit-learn
	@touch $@

$(VENV)/.bench: pyproject.toml constraints.txt | $(VENV)/.core
	$(PIP) --no-build-isolation --editable '.[bench]' tensorflow-cpu
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.core
	$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

$(VENV)/.lint: pyproject.toml constraints.txt | $(VENV)/.core
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
