# Every verb sets itself up: a checkout, Python 3.11 or later and make are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: setup demo test test-fast coverage check bench clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

demo: setup
	$(BIN)/fastfedul demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tests sync tens of thousands of small files, so their folders go to memory if there
# is room. Containers often have 64 MB there, which is too little.
IN_MEMORY := $(shell free=$$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1); \
	[ "$${free:-0}" -gt 4000000 ] && echo TMPDIR=/dev/shm)
PYTEST = $(IN_MEMORY) $(BIN)/pytest -q --dist loadfile --no-loadscope-reorder
ON_ALL_CORES = --numprocesses auto --maxprocesses 4

test: check
	$(PYTEST) $(ON_ALL_CORES)

# For a contributor between two edits: no training of many rounds, no simulation, no
# browser, no deployment. Not what a change must pass; that is `make test`.
test-fast: setup
	$(PYTEST) --numprocesses 2 -m "not slow and not deploy"

# Tracing every line makes the tests much slower, so it is a verb of its own.
coverage: setup
	$(PYTEST) $(ON_ALL_CORES) --cov --cov-report=term:skip-covered

bench: setup
	$(BIN)/python benchmarks/unlearn.py
	$(BIN)/python benchmarks/kronecker.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/object_store.py
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/flower.py

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
