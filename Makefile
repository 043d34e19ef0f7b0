# `make demo` and `make test` do everything on a fresh machine with Python 3.11+, make and git.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
TESTS  := -n 2 --dist worksteal
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
# Many tests start processes, which would compile all modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all checks tests test-exhaustive test-models test-flower test-browser test-adversary bench docs format mutants golden wheel clean
help:  ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.installed  ## train on skewed digits and calibrate: a minute after the installation
	$(BIN)/unskew demo

test: checks  ## formatting, lint, types and tests: under 6 minutes on 2 cores
	$(BIN)/python -m pytest $(TESTS) -m "not slow and not exhaustive"

test-all: checks  ## the same, with longer tests and more cases, foreign models, the wheel and Flower: 25 minutes
	$(MAKE) --no-print-directory -j 2 tests wheel
	$(MAKE) --no-print-directory test-models
	$(MAKE) --no-print-directory test-flower
	$(MAKE) --no-print-directory test-browser

checks: $(VENV)/.developing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

tests: $(VENV)/.developing
	$(BIN)/python -m pytest $(TESTS) -m "not exhaustive"

test-exhaustive: $(VENV)/.developing  ## all cases of all products: a quarter of an hour
	$(BIN)/python -m pytest $(TESTS)

test-adversary: $(VENV)/.developing  ## 20,000 mutated files, lying sites, 200 kills; figures to docs/explanation/promises.md: 20 minutes
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m adversary --mutants 20000 --kills 200 --out $(CURDIR)/docs/explanation/promises.md

test-models: build/models/.installed  ## what needs torchvision, timm, transformers, pyarrow, TensorBoard or MLflow, in an environment of its own
	build/models/bin/python -m pytest $(TESTS) -m "not exhaustive" tests/models/test_zoo.py tests/models/test_foreign.py tests/models/test_foreign_preparation.py tests/data/test_images.py tests/data/test_sites.py tests/report/test_trackers.py

build/models/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv build/models
	build/models/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,models,parquet,log]'
	@touch $@

test-flower: build/flower/.installed  ## the app on Flower: simulation, deployments on loopback, lost and lying sites: 15 minutes
	build/flower/bin/python -m pytest -m "not exhaustive" tests/flower

test-browser: $(VENV)/.developing  ## the demo's report in headless Chromium, which is found or installed: a minute
	@PYTHONPATH=tests $(BIN)/python -c 'import sys; from helpers.browser import chromium; sys.exit(not chromium())' || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || \
		{ echo "Chromium is not here and could not be installed: install it, or name one by UNSKEW_CHROMIUM"; exit 1; }
	$(BIN)/python -m pytest -m "not exhaustive" tests/report/test_browser.py

build/flower/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv build/flower
	build/flower/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,flower]'
	@touch $@

bench: $(VENV)/.developing  ## measure speed, side by side with plain loops and peers: half an hour; on a GPU also lanes
	$(BIN)/python benchmarks/auto.py
	$(BIN)/python benchmarks/workers.py
	$(BIN)/python benchmarks/peers
	$(BIN)/python benchmarks/calibration.py collect --images 1024
	$(BIN)/python benchmarks/calibration.py server
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(MAKE) bench-gpu; fi

bench-gpu: $(VENV)/.developing
	$(BIN)/python benchmarks/lanes.py train --precision bfloat16 --rounds 12
	$(BIN)/python benchmarks/lanes.py train --precision tf32 --rounds 4
	$(BIN)/python benchmarks/lanes.py train --precision bfloat16 --rounds 3 --method moon
	$(BIN)/python benchmarks/lanes.py train --precision bfloat16 --rounds 20 --runs 1 --alphas 0.1
	for lanes in 10 64; do $(BIN)/python benchmarks/lanes.py clients --precision bfloat16 --lanes $$lanes; done
	for net in "resnet18 --norm group" "mobilenetv2 --norm batch"; do \
		$(BIN)/python benchmarks/lanes.py steps --model $$net --classes 100 --layout apart --lanes 10 --precision bfloat16 \
			--loop eager,compiled --loop-steps 100 --repeat 30; done
	$(BIN)/python benchmarks/calibration.py collect --device cuda --images 20480 --repeat 7
	$(BIN)/python benchmarks/table2.py

docs: $(VENV)/.documenting  ## build the site to build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict
	@echo build/site/index.html

format: $(VENV)/.developing  ## put the code into its form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

mutants: $(VENV)/.developing  ## put small mistakes into a copy of the sources: do the tests notice? A quarter of an hour
	$(BIN)/python tests/mutants.py --jobs 2

golden: $(VENV)/.developing  ## write the stored results of tests/golden anew, for review in the diff
	PYTHONPATH=tests $(BIN)/python tests/golden/test_golden.py

wheel: $(VENV)/.developing  ## build the wheel, install it into an environment of its own and run it there
	rm -rf dist build/wheel && $(BIN)/python -m build --wheel --outdir dist .
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt dist/unskew-*.whl
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

$(VENV)/.developing: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.documenting: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	@touch $@
