# Each target makes its own virtual environment: nothing needs to be there but Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test check wheel clean

.venv/.installed: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[test]' --constraint constraints.txt
	touch $@

test: .venv/.installed
	$(BIN)/python -m pytest

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: .venv/.installed
	rm -rf dist
	$(BIN)/python -m build --quiet --wheel

clean:
	rm -rf .venv .venv-wheel dist build *.egg-info
