# Every target sets up first, so each works on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

.PHONY: setup train test tour compat compat-torch fuzz check bench docs clean

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

# What asserts what a machine gives (times, shares, memory) has it for itself; the rest runs beside itself, a group of tests at a time, so
# that what they capture is captured once (tests/conftest.py); three groups for two cores, since tests of several processes wait for each other. Byte code is written,
# whatever the shell says: dozens of processes load the same package.
ALONE := tests/measure tests/emulate tests/gpu tests/multiprocess/test_emulate.py tests/multiprocess/test_failures.py tests/multiprocess/test_hosts.py \
	tests/multiprocess/test_doctor_hosts.py
BESIDE := --numprocesses $(shell expr 3 \* $$(getconf _NPROCESSORS_ONLN) / 2) --maxprocesses 8 --dist loadscope --no-loadscope-reorder
test tour fuzz: export PYTHONDONTWRITEBYTECODE :=
test: setup
	@status=0; \
	$(BIN)/python -m pytest $(BESIDE) tests $(ALONE:%=--ignore=%) < /dev/null || status=1; \
	$(BIN)/python -m pytest $(ALONE) < /dev/null || status=1; \
	exit $$status

# A test for each law and each room, those with the mark `tour`, in about 10 s of CPU time.
tour: setup
	@$(BIN)/python tests/tour.py < /dev/null

# The adapters with the oldest versions of the libraries that they are for, in an environment of its own; the rest as it is pinned.
OLDEST := transformers==5.0.0 accelerate==1.3.0 lightning==2.4.0
FREE := accelerate|click|fsspec|hf-xet|httpcore2|httpx2|huggingface_hub|lightning|packaging|pytorch-lightning|tokenizers|torchmetrics|transformers|typer
compat:
	@test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	@grep -vE '^($(FREE))==' constraints.txt > $(VENV)-oldest/constraints.txt
	@$(VENV)-oldest/bin/pip install --quiet --constraint $(VENV)-oldest/constraints.txt torch
	@$(VENV)-oldest/bin/pip install --quiet --constraint $(VENV)-oldest/constraints.txt --editable '.[dev]' $(OLDEST)
	$(VENV)-oldest/bin/python -m pytest tests/multiprocess/test_huggingface_trainer.py tests/multiprocess/test_accelerate_loop.py \
		tests/multiprocess/test_lightning.py tests/multiprocess/test_lightning_shares.py < /dev/null

# Capture and runtime with another torch, in an environment of its own.
TORCH := 2.11.0
compat-torch:
	@test -x $(VENV)-torch-$(TORCH)/bin/python || $(PYTHON) -m venv $(VENV)-torch-$(TORCH)
	@grep -v '^torch==' constraints.txt > $(VENV)-torch-$(TORCH)/constraints.txt
	@$(VENV)-torch-$(TORCH)/bin/pip install --quiet --constraint $(VENV)-torch-$(TORCH)/constraints.txt torch==$(TORCH)
	@$(VENV)-torch-$(TORCH)/bin/pip install --quiet --constraint $(VENV)-torch-$(TORCH)/constraints.txt --editable '.[dev]'
	$(VENV)-torch-$(TORCH)/bin/python -m pytest --numprocesses 2 --dist loadscope tests/frontend tests/runtime < /dev/null

# The random tests with new seeds, round after round, until Ctrl-C. TESTS confines them; HETERODYNE_FUZZ_SEED=N runs one round again.
fuzz: setup
	@$(BIN)/python tests/fuzz.py $(TESTS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory tour

bench: setup
	$(BIN)/python benchmarks/run_all.py

docs: setup
	$(BIN)/pip install --quiet mkdocs-material
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(VENV)-oldest runs site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
