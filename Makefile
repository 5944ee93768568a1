# headrace: `make demo` shows it, `make test` proves it. Both make what they need in .venv and, once that is there, need no network.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# one BLAS thread a device: the devices of `local` are the cores
RUN    := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench gpu-check clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 20

demo: $(VENV)/installed-core  ## plan, foretell and train GPT-2 on this machine, and compare
	$(RUN) -m headrace.demo

test: lint  ## lint, types, and every test (about ten minutes on two cores)
	$(RUN) -m pytest -n 2

lint: $(VENV)/installed-all  ## ruff and mypy (strict on ir/)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed-all  ## the long measurements, one script a claim; results as dated files in benchmarks/results
	for script in $(filter-out benchmarks/gpu_check.py,$(wildcard benchmarks/*.py)); do $(RUN) $$script || exit 1; done

gpu-check: $(VENV)/installed-all  ## what needs a CUDA device: kernels, parity, prediction; one table
	$(RUN) benchmarks/gpu_check.py

clean:  ## everything that the other targets made
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. A stamp newer than pyproject.toml means: installed, no pip call, no network.

$(BIN)/python:
	.ci/venv $(PYTHON) $(VENV)

$(VENV)/installed-core: pyproject.toml | $(BIN)/python
	@echo 'installing what the command needs in $(VENV)'
	$(PIP) install -qq 'setuptools>=77'
	$(PIP) install -qq --no-build-isolation --editable .
	touch $@

# torch by itself and first: a range in another package would take a CUDA build of several GB
$(VENV)/installed-all: pyproject.toml $(VENV)/installed-core
	@echo 'installing what the tests need in $(VENV): some minutes and 2.6 GB, once'
	$(PIP) install -qq 'torch==2.13.0'
	$(PIP) install -qq --no-build-isolation --editable '.[all]'
	touch $@
