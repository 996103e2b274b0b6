# What a fresh checkout needs; each target sets up .venv by itself. `make` lists the targets.
#
#   make PYTHON=python3.12 test          another interpreter
#   make RAYDZ_NO_NATIVE=1 test          without a C++ compiler: torch references instead of the compiled kernels

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
RAYDZ_NO_NATIVE ?=
BENCH_FLAGS ?= --quick
# What the installed package was made from: touching one of these installs again.
BUILD_INPUTS := pyproject.toml constraints-dev.txt CMakeLists.txt raydz/version.py $(wildcard native/*)
FAST_TESTS := tests/test_layers.py tests/test_imports.py tests/config tests/ops tests/cli $(wildcard tests/zero/test_layout.py)

BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/.raydz-installed
# One torch thread a test process: tests start several ranks on few cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
ifneq ($(RAYDZ_NO_NATIVE),)
export RAYDZ_NO_NATIVE
endif

.PHONY: help setup demo test test-all checks sanitize arm bench cluster cluster-stop clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP) ## make .venv and install raydz with its development tools into it

demo: $(STAMP) ## train a small model with ZeRO-3 on two Ray workers of this machine
	bash jobs/demo.sh

test: $(STAMP) ## fast tests
	$(PYTEST) tests -m "not slow"

test-all: $(STAMP) ## all tests
	$(PYTEST) tests

checks: $(STAMP) ## lint, format, types, layers and the fastest tests: under three minutes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror native/*.cpp native/*.hpp
	$(BIN)/mypy
	$(PYTEST) -q $(FAST_TESTS) -m "not slow and not s3 and not ray"

sanitize: $(STAMP) ## the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer (needs gcc)
	bash tests/native/sanitize.sh $(BIN)/python

arm: ## the kernels for 64-bit ARM against x86's, bit for bit (needs g++-aarch64-linux-gnu and qemu-user)
	bash tests/native/arm.sh

bench: $(STAMP) ## measure raydz and its peers (BENCH_FLAGS=--quick)
	for file in tests/bench/*.py; do echo "== $$file"; $(BIN)/python $$file $(BENCH_FLAGS); done

cluster: $(STAMP) ## start a Ray cluster of three nodes on this machine, beside any other Ray
	@bash cluster/local.sh start

cluster-stop: ## stop that cluster, and no other Ray
	@bash cluster/local.sh stop

clean: ## remove build results and caches; .venv and runs stay
	rm -rf build dist_wheels *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find raydz tests jobs -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): $(BUILD_INPUTS)
	@if [ -z "$(RAYDZ_NO_NATIVE)" ] && ! command -v $${CXX:-c++ g++ clang++} > /dev/null; then \
	    echo "raydz compiles a small C++17 extension, and no C++ compiler was found." >&2; \
	    echo "  Get one:        apt-get install g++   |   dnf install gcc-c++" >&2; \
	    echo "  Or go without:  make RAYDZ_NO_NATIVE=1 $(or $(MAKECMDGOALS),setup)   (same results, slower CPU steps)" >&2; \
	    exit 1; \
	fi
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@# The build tools come first: the extension is built with the pinned ones, not with what is newest today.
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt scikit-build-core nanobind cmake ninja
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r tests/support/seaweedfs.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints-dev.txt -e ".[dev]"
	touch $@
