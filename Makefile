# Two commands on a fresh machine with Python, gcc and make:
#   make demo    sets up and shows a simulated node
#   make test    sets up and runs the tests
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test lint wheel clean

demo: $(VENV)/.runtime
	$(BIN)/gpuidle watch --demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -q

# What else a change must pass.
lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel: $(VENV)/.test
	$(BIN)/python -m build --outdir dist .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/.runtime

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache
