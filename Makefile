# Every verb sets itself up: a checkout, Python 3.11 or later and make are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: setup demo test check bench clean

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

bench: setup
	$(BIN)/python benchmarks/unlearn.py
	$(BIN)/python benchmarks/kronecker.py
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/flower.py

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
