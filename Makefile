# make demo    sets up what it needs, trains a small model on two local workers, then on three: plan 2-1
# make test    sets up what it needs, checks the style, runs every C++ and Python test
#
# Both work on a fresh clone of a bare Debian or Ubuntu with Python 3.10 or later, as root or not, in any
# order and again. tools/setup.sh says what it does and which variables steer it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON := .venv/bin/python
# cmake finds the ninja of the virtual environment on PATH.
CMAKE := CMAKE_GENERATOR=Ninja PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/cmake
JOBS ?= $(shell nproc)
CXX_FILES = $(shell find csrc tests/cpp tests/fuzz bench/micro -name '*.h' -o -name '*.cc' -o -name '*.cu' | sort)

.PHONY: help setup test test-fast build-cpp test-cpp compile-python test-python style demo examples faults docs lint asan tsan fuzz bench-build bench clean

help:
	@grep -E '^# make' Makefile | sed 's/^# //'
	@echo "make setup | test-fast | test-cpp | test-python | faults | examples | style | docs | lint | asan | tsan | fuzz | bench | clean"

setup:
	@tools/setup.sh

# What is imported is compiled once, whatever the environment says: up to eight workers, and the ranks of each, read it.
unexport PYTHONDONTWRITEBYTECODE

# A warning fails a test, not an install.
test build-cpp test-cpp test-python: export PIPEDREAM_WARNINGS_AS_ERRORS := ON
# The C++ tests are compiled with the core, while pip unpacks torch.
test build-cpp test-cpp: export PIPEDREAM_BUILD_TESTS := ON
# Beside running C++ tests, which wait for a third of their time, the style is checked and the Python tests compiled.
test: build-cpp
	@$(MAKE) --no-print-directory -o setup -o build-cpp -j3 --output-sync=target test-cpp style compile-python
	@$(MAKE) --no-print-directory -o setup test-python

# The C++ tests load the libzmq that the pyzmq wheel brings. Two more at once than there are cores, as many wait.
CTEST = libzmq=$$(echo .venv/lib/python*/site-packages/pyzmq.libs/libzmq*.so*); \
	PIPEDREAM_LIBZMQ="$${PIPEDREAM_LIBZMQ:-$$PWD/$$libzmq}" .venv/bin/ctest --parallel $$(($(JOBS) + 2))
# In the directory where setup.py has compiled the core, so that it is compiled once.
MODULE_DIR = $(PYTHON) -c 'import sys, sysconfig as s; print(f"build/python/{sys.implementation.cache_tag}-{s.get_platform()}")'
build-cpp: setup
	@echo "==> C++ tests (build/python)"
	@tree=$$($(MODULE_DIR)); \
	$(CMAKE) -S . -B "$$tree" --log-level=STATUS -DPIPEDREAM_BUILD_TESTS=ON -DPIPEDREAM_WARNINGS_AS_ERRORS=ON; \
	$(CMAKE) --build "$$tree" --parallel $(JOBS)

test-cpp: build-cpp
	@$(CTEST) --test-dir "$$($(MODULE_DIR))" --output-on-failure

PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q

# Workers that begin at once would each compile all tests.
compile-python: setup
	@said=$$($(PYTEST) --collect-only 2>&1) || { echo "$$said" | tail -n 60; exit 1; }

# After the C++ tests: a broken core is better seen there. One more at once than there are cores, as the tests of
# what fails wait; each has ranks of its own (tests/farm.py), whose memory is the limit on a large machine.
test-python: setup
	@echo "==> Python tests"
	@$(PYTEST) -n $$(($(JOBS) + 1)) --maxprocesses 8 --dist worksteal

# Faults at every step of small runs, and ten kills of an example. make test has some of the first.
faults: setup
	@PIPEDREAM_FAULTS=all $(PYTEST) -n $(JOBS) --maxprocesses 8 --dist worksteal tests/faults/test_injected.py
	@$(PYTHON) tests/faults/kill_and_resume.py

# What a change is tried with: no C++ tests, and neither what waits for failures nor what takes long by itself.
test-fast: setup
	@$(PYTEST) -n $(JOBS) --maxprocesses 8 --dist worksteal -m 'not faults and not slow'

# Also where torch finds a GPU that this build of the core cannot use, which run() refuses.
demo: setup
	@echo "==> digits example on two local workers"
	@export PIPEDREAM_DEVICE=$${PIPEDREAM_DEVICE:-$$($(PYTHON) -c \
	  'from pipedream import _core; print("auto" if _core.cuda_available() else "host")')}; \
	$(PYTHON) examples/digits.py --workers 2; \
	echo "==> the same on three, the first stage on two of them"; \
	$(PYTHON) examples/digits.py --plan 2-1 --epochs 3 --output-dir results/digits-2-1

# Libraries of the examples, but for digits.py and char_lm.py, beside the torch that is there: the newest torchvision
# would bring another.
examples: setup
	@torch=$$($(PYTHON) -c 'from importlib.metadata import version; print(version("torch"))'); \
	$(PYTHON) -m pip install -q --disable-pip-version-check --no-build-isolation '.[examples]' "torch==$$torch"

# A warning is an error. The Python tests build them, too.
docs: setup
	@$(PYTHON) -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "==> build/docs/index.html"

style: setup
	@echo "==> ruff"
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@echo "==> mypy"
	@$(PYTHON) -m mypy
	@if command -v clang-format >/dev/null; then echo "==> clang-format"; clang-format --dry-run --Werror $(CXX_FILES); \
	else echo "==> clang-format is not installed: not checked"; fi

lint: style
	@if command -v clang-tidy >/dev/null; then echo "==> clang-tidy"; $(CMAKE) --preset dev >/dev/null; \
	clang-tidy --quiet -p build/dev $$(find csrc -name '*.cc' -not -path 'csrc/bindings/*' | sort); \
	else echo "==> clang-tidy is not installed: not checked"; fi

# One command each: configure, build, run the C++ tests under the sanitizer.
asan: setup
	@$(CMAKE) --preset asan-ubsan
	@$(CMAKE) --build --preset asan-ubsan --parallel $(JOBS)
	@$(CTEST) --preset asan-ubsan

tsan: setup
	@$(CMAKE) --preset tsan
	@$(CMAKE) --build --preset tsan --parallel $(JOBS)
	@$(CTEST) --preset tsan

# libFuzzer on each target for FUZZ_SECONDS, under ASAN and UBSAN; what it finds that is new joins the corpus. clang.
FUZZ_SECONDS ?= 60
fuzz: setup
	@$(CMAKE) --preset fuzz
	@$(CMAKE) --build --preset fuzz --parallel $(JOBS) --target $(patsubst tests/fuzz/%.cc,pd_%,$(wildcard tests/fuzz/*_fuzz.cc))
	@for target in $(patsubst tests/fuzz/%_fuzz.cc,%,$(wildcard tests/fuzz/*_fuzz.cc)); do \
	  echo "==> $$target"; mkdir -p build/fuzz/corpus/$$target; \
	  build/fuzz/tests/fuzz/pd_$${target}_fuzz -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 \
	    -artifact_prefix=build/fuzz/$$target- build/fuzz/corpus/$$target tests/fuzz/corpus/$$target 2>&1 | tail -n 12; \
	  build/fuzz/tests/fuzz/pd_$${target}_fuzz -merge=1 tests/fuzz/corpus/$$target build/fuzz/corpus/$$target 2>/dev/null; \
	done

bench-build: setup
	@$(CMAKE) --preset release
	@$(CMAKE) --build --preset release --parallel $(JOBS)

bench: bench-build
	@for bench in build/release/bench/micro/pd_*_bench; do echo "==> $$bench"; $$bench; done

clean:
	rm -rf build
	@echo "the virtual environment stays; 'rm -rf .venv' removes it"
