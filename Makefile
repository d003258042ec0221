# Every target sets up first, so each works on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

.PHONY: setup train test check bench docs clean

setup: $(STAMP)

# torch comes first and pinned: a later resolver then finds it installed and fetches no other build.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a few minutes on a fresh machine)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --constraint constraints.txt torch
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

train: setup
	@$(BIN)/python examples/first_light.py

# What starts no processes is run beside itself; what does has the machine for itself.
ALONE := tests/multiprocess tests/runtime tests/measure tests/emulate tests/gpu
test: setup
	$(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist worksteal $(filter-out $(ALONE) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
	$(BIN)/python -m pytest $(ALONE)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python benchmarks/run_all.py

docs: setup
	$(BIN)/pip install --quiet mkdocs-material
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) runs site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
