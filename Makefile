# make demo: set up and run the main job.  make test: set up and pass the tests.  make train: train with 4 processes.
PYTHON ?= python3
VENV ?= .venv
# What test-gpu installs: CUDA=cuda12 for older drivers, and for Volta.
CUDA ?= cuda13
SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
BIN := $(VENV)/bin
# Without --no-compile pip compiles all modules of all packages, most of which nothing imports.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Tests of one file share what it has made, and run in one process.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
# Collection compiles what the tests import, once instead of in each of their processes.
COLLECT := $(BIN)/python -m pytest -qq --collect-only > /dev/null
# Compile modules once: the tests start many processes.
unexport PYTHONDONTWRITEBYTECODE

# The environment of test-newest-torch, with the newest torch: a build for CUDA, of several GB, which runs on the CPU too.
NEWEST ?= build/newest-torch
TORCH_TESTS := tests/jobs/test_torch*.py tests/collectives/torch tests/collectives/backends/test_torch_program.py

.PHONY: demo train test test-all thorough test-long test-random test-newest-torch test-gpu lint docs bench wheel clean

demo: $(VENV)/.demo
	mkdir -p build
	$(BIN)/topoplan plan dgx-1v --gpus 1,4,5,7 -o build/plan.json --plot build/trees.png
	$(BIN)/topoplan verify build/plan.json
	$(BIN)/topoplan bench build/plan.json --sizes 64KB:4MB
	$(BIN)/topoplan simulate build/plan.json --sizes 64KB:256MB
	$(BIN)/topoplan compare dgx-1v --all-allocations --plot build/allocations.png

train: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 4 -m collectives.examples.train_cifar_like --density 0.01

test: $(VENV)/.test
	$(PYTEST)

# The rest of what CI runs: jobs of many processes, all of a kind where test takes a few, and the site. Many of these
# tests wait for processes, so the site is built beside them.
test-all: $(VENV)/.test $(VENV)/.docs
	$(MAKE) --jobs=2 docs thorough

thorough: $(VENV)/.test
	$(PYTEST) -m "(thorough or listings) and not gpu and not slow"

# What takes too long for CI: everything, every size, every mutant.
test-long: $(VENV)/.test
	$(PYTEST) -m "slow and not gpu"

# Other examples each time; SEED=... repeats a run.
test-random: $(VENV)/.test
	@echo "seed $(SEED)"
	$(PYTEST) -m "hypothesis and not gpu and not slow" \
		--hypothesis-profile=random --hypothesis-seed=$(SEED)

# The tests of torch, on the newest release that pip finds: by torch's group, and by its Python back end.
test-newest-torch:
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade -e ".[test-base,torch]"
	$(NEWEST)/bin/python -c "import torch; print('torch', torch.__version__)"
	$(NEWEST)/bin/python -m pytest -n auto --dist loadfile -m "not gpu and not slow" $(TORCH_TESTS)
	TOPOPLAN_TEST_BACKEND_BASE=1 $(NEWEST)/bin/python -m pytest -n auto --dist loadfile -m "not gpu and not slow" \
		tests/jobs/test_torch_scenarios.py tests/jobs/test_torch_hook.py

test-gpu: $(VENV)/.gpu
	$(BIN)/python -m pytest -m gpu || test $$? -eq 5

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, into build/site; a broken link or docstring ends it. Its pages are links to what lies in the repository.
PAGES := $(wildcard *.md) docs notebooks collectives/examples CITATION.cff LICENSE
docs: $(VENV)/.docs
	rm -rf build/pages
	mkdir -p build/pages/collectives
	@$(foreach page,$(PAGES),ln -s $(CURDIR)/$(page) build/pages/$(page) &&) true
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

bench: $(VENV)/.test
	$(BIN)/python -m tests.bench

# Wheel and source distribution, into dist.
wheel: $(VENV)/.test
	$(BIN)/python -m hatchling build

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(INSTALL) -e .
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(INSTALL) -e ".[test]"
	$(COLLECT) tests/topoplan topoplan & $(COLLECT) --ignore=tests/topoplan tests collectives; wait
	touch $@

$(VENV)/.gpu: pyproject.toml | $(BIN)/python
	$(INSTALL) -e ".[test-$(CUDA)]"
	touch $@

$(VENV)/.lint: pyproject.toml | $(BIN)/python
	$(INSTALL) "pip>=25.1"
	$(INSTALL) -e ".[test]" --group lint
	touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(INSTALL) "pip>=25.1"
	$(INSTALL) --group docs
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
