# Everything a contributor types. Environments are made on first use and shared by all clones: see .ci/environment.py.

PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=

environment := $(PYTHON) .ci/environment.py
current     := $(environment) current
vision      := $(environment) vision
xla         := $(environment) xla

# One thread for each process: several processes share the machine, and sums are the same on every machine.
threads := OMP_NUM_THREADS=1
# Two workers; the tests that start processes of their own stay on one of them (tests/conftest.py).
pytest  := python -m pytest -n 2 --dist loadgroup --ignore=tests/docs
# torch_xla allows one runtime in a process and prints from many threads: four CPU devices, a process for each file.
one_xla := PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 XLA_THREAD_POOL_SIZE=16 $(threads)
xla_tests = $(sort $(shell grep -rlE 'mark\.xla' tests --include='test_*.py' 2>/dev/null))

.DEFAULT_GOAL := help
.PHONY: help demo test test-current test-vision test-xla test-fast check lint format types layers docs-check bench models wheel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile

demo:  ## train a small model with a skip connection in one process; draw its graph and its timeline
	@$(environment) current:base python -m ppdsl demo

test:  ## run all tests on the current torch, then on torch 2.9 with torch_xla
	@status=0; \
	$(MAKE) --no-print-directory test-current || status=1; \
	$(MAKE) --no-print-directory test-vision || status=1; \
	$(MAKE) --no-print-directory test-xla || status=1; \
	exit $$status

test-current:  ## run the tests on the current torch only
	@echo "== tests, current torch"
	@$(threads) $(current) $(pytest) $(PYTEST_ARGS)

test-vision:  ## run the models of timm and torchvision on the current torch only
	@echo "== models of timm and torchvision, current torch"
	@$(threads) $(vision) python -m pytest -n 2 -m zoo tests/zoo tests/test_example_specs.py $(PYTEST_ARGS)

test-xla:  ## run the tests on torch 2.9 with torch_xla only
	@echo "== tests, torch 2.9"
	@status=0; \
	$(threads) $(xla) $(pytest) -m 'not xla' $(PYTEST_ARGS) || status=1; \
	for file in $(xla_tests); do \
		echo "== torch_xla: $$file"; \
		$(one_xla) $(xla) python -m pytest -m xla $(PYTEST_ARGS) $$file || status=1; \
	done; \
	exit $$status

test-fast:  ## run the tests that start no processes and build no real models, current torch
	@$(threads) $(current) $(pytest) -m 'not distributed and not zoo' $(PYTEST_ARGS)

check: lint types layers docs-check test  ## all of it: what CI runs

lint:  ## formatting and ruff's rules
	@$(current) ruff format --check
	@$(current) ruff check

format:  ## format and apply ruff's safe fixes
	@$(current) ruff check --fix-only
	@$(current) ruff format

types:  ## mypy, strict
	@$(current) mypy

layers:  ## the import layers
	@$(current) lint-imports

docs-check:  ## links of all pages, and what their examples print
	@$(threads) $(current) python -m pytest tests/docs $(PYTEST_ARGS)

bench:  ## measure what the documentation gives numbers for; BENCH_ARGS='--write docs/reference/benchmarks.md' keeps it
	@$(threads) $(current) python -m tests.benchmarks $(BENCH_ARGS)

models:  ## record all real models on both versions of torch and write docs/reference/models.md
	@$(threads) $(current) python -m tests.zoo.table
	@$(threads) $(vision) python -m tests.zoo.table
	@$(threads) $(xla) python -m tests.zoo.table

wheel:  ## build the wheel into dist/
	@$(current) python -m hatchling build -t wheel

clean:  ## remove what tools left in the checkout, and environments that no longer match pyproject.toml
	@rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@$(environment) --prune
