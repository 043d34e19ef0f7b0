# `make demo` and `make test` do everything on a fresh machine with Python 3.11+, make and git.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: help demo test test-all format golden wheel clean
help:  ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.installed  ## train on skewed digits and calibrate: a minute after the installation
	$(BIN)/unskew demo

test: $(VENV)/.developing  ## formatting, lint, types and tests: under 6 minutes on 2 cores
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/.developing  ## the same, with the large products of cases and the wheel
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2
	$(MAKE) wheel

format: $(VENV)/.developing  ## put the code into its form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: $(VENV)/.developing  ## write the stored results of tests/golden anew, for review in the diff
	$(BIN)/python tests/test_golden.py

wheel: $(VENV)/.developing  ## build the wheel, install it into an environment of its own and run it there
	rm -rf dist build/wheel && $(BIN)/python -m build --wheel --outdir dist .
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/unskew-*.whl
	build/wheel/bin/unskew --version && build/wheel/bin/python -m unskew partition --json > /dev/null

clean:  ## remove environments, caches and what was built; runs stay
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is too old: Unskew needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	@touch $@

$(VENV)/.developing: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	@touch $@
