# Every verb sets itself up: a checkout, Python 3.11 or later and make are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: setup demo test test-fast check bench clean

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

test: check
	$(BIN)/pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --cov --cov-report=term:skip-covered

# For a contributor between two edits: no training of many rounds, no simulation, no
# browser, no deployment. Not what a change must pass; that is `make test`.
test-fast: setup
	$(BIN)/pytest -q --numprocesses 2 --dist loadfile -m "not slow and not deploy"

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
