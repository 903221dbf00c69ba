# make demo     the whole pipeline on the sample, then the results
# make test     the tests; make test-slow the ones that take minutes; make lint ruff and mypy
# make bench    speed and memory against other libraries, about half an hour alone; ROW=step runs one row
# make services Prefect server, worker and MLflow on localhost; make stop ends them
# make clean    what the pipeline made and DVC can bring back; make clean-all everything it made

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready
EXTRAS := download,orchestrate,language,s3,sample,export,dev
export PREFECT_PORT ?= 4200
export MLFLOW_PORT ?= 5000
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help setup demo test test-slow bench lint services stop clean clean-all

help:
	@sed -n 's/^# //p' Makefile | head -5

setup: $(READY)

# img2dataset's packaging asks for the Python 3.6 backport `dataclasses`, which keeps Prefect's server from starting.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
		|| { echo "error: Python 3.11 is needed, $(PYTHON) is another; give it as PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv: 7 GB, about five minutes the first time (log: .venv/install.log)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' 2>&1 \
		| tee .venv/install.log \
		| { grep --line-buffered -E '^ *(Downloading|Using cached|Installing|Successfully installed|ERROR)' || true; } \
		| cut -c1-100
	@$(BIN)/python -m pip uninstall --quiet --yes dataclasses
	@touch $(READY)

demo: setup
	@mdc sample
	@python -m pipelines.full
	@mdc results

test: setup
	@OMP_NUM_THREADS=1 pytest

# Slurm's tests need root and `apt-get install slurm-wlm munge`, those of several hosts root and iproute2; else they are
# skipped, with the reason.
test-slow: setup
	@OMP_NUM_THREADS=1 pytest -m slow --timeout 3600 -rs

bench: setup
	@python -m bench $(ROW)

lint: setup
	@ruff check .
	@ruff format --check .
	@mypy

services: setup
	@python infra/services.py start

stop: setup
	@python infra/services.py stop

clean:
	rm -rf data/downloaded data/captions data/shards outputs .dvc/tmp .pytest_cache .ruff_cache .mypy_cache
	find mdc pipelines tests infra -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean
	rm -rf data/sample runs .dvc/cache dvc.lock mlflow.db mlartifacts .prefect .services
