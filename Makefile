# `make demo` and `make test` set everything up on a fresh machine (Python 3.11+, make, git) and need no GPU.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint format docs bench pins size wheel clean

help:          ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

# One stamp per set of extras; each is made again when the project file or a pin changes.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("halfbyte needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

demo: $(VENV)/.ready-all   ## the main job on the shipped model: table, texts, HTML report
	$(BIN)/halfbyte demo

test: $(VENV)/.ready-test  ## lint, types and the whole test suite on a CPU
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	GOMP_SPINCOUNT=3000 $(BIN)/python -m pytest

lint: $(VENV)/.ready-test  ## ruff and mypy alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-test  ## let ruff rewrite
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.ready-test  ## write the generated tables into README.md and docs/ again
	$(BIN)/python scripts/make_tables.py

bench: $(VENV)/.ready-all  ## time what exists on this machine
	$(BIN)/halfbyte bench decode
	$(BIN)/halfbyte bench linear

pins:          ## write constraints.txt again from what is installed
	@{ head -1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//'; } > .pins && mv .pins constraints.txt

size:          ## the size of every source file, largest first
	@find src -name '*.py' | xargs wc -l | sort -rn

wheel: $(VENV)/.ready-dev  ## a pure-Python wheel in dist/
	$(BIN)/python -m build --wheel

clean:         ## remove the virtual environment, caches and build output
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
