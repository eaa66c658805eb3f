# Two commands on a fresh machine: `make demo` trains a GPT on two CPU processes, `make test` runs the tests of the loop.
# They need Python >= 3.10, pip and make; everything else goes into $(VENV).
#
#   PYTHON=python3.12 make demo    another interpreter, for the moment at which $(VENV) is made
#   TORCH=... make demo            what pip is asked for instead of the locked torch, options included

PYTHON ?= python3
VENV := .venv
TORCH ?= torch==2.13.0

# The oldest and the newest release of Lightning that pyproject.toml allows, for `make test-versions`.
LIGHTNINGS ?= 2.6.0 2.6.6
VERSIONS := $(VENV)/versions
SMOKE := tests/lightning/test_private.py tests/lightning/test_preemption.py tests/lightning/test_parity.py \
    tests/lightning/test_resume.py tests/lightning/test_cli.py tests/lightning/test_summaries.py \
    tests/lightning/test_launch.py::test_forked_and_spawned_ranks_bring_the_full_weights_back

# Two pytest processes at a time, each with ranks of its own: ranks wait for each other, and leave two cores idle meanwhile.
# A file's tests stay together, so that what they share is made once; files go out in their order, with short ones at the end.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# `make test-slow SAMPLE=1` takes one case of each test, and none that takes long; so do the models and fidelity.
# With `PART=1/3` one of three parts of a suite's tests runs, which have none in common (0/3, 1/3, 2/3).
SAMPLE ?=
PART ?=
CASES := $(if $(SAMPLE),--cases $(SAMPLE)) $(if $(PART),--part $(PART))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -c constraints.txt
LOCK := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo dist test test-slow test-all test-versions test-models test-stores test-fidelity test-cluster torture torture-cluster lint types docs bench clean

help:
	@echo "make demo             train examples/train_gpt.py on two CPU processes (minutes)"
	@echo "make test             the tests of the loop (nine minutes on two cores)"
	@echo "make test-all         all tests but the long harnesses (an hour)"
	@echo "make test-versions    a part of the tests with the oldest and the newest Lightning (three minutes)"
	@echo "make test-models      models of transformers and peft, each against DDP (two minutes)"
	@echo "make test-stores      checkpoints in servers of object stores (four minutes)"
	@echo "make test-cluster     real SLURM and torchrun clusters on this machine (two minutes; root installs SLURM)"
	@echo "make test-fidelity    hostile modules, each beside DDP (ten minutes)"
	@echo "make torture          the long harnesses: kills, system calls, hostile files; further combinations of slow tests (hours)"
	@echo "make torture-cluster  twenty preemptions, killed ranks and lost nodes there (half an hour)"
	@echo "make lint             ruff: rules and format"
	@echo "make types            pyright, strict on src"
	@echo "make docs             the documentation as a site, in build/site; warnings and broken links are errors"
	@echo "make bench            step time and peak memory against DDP, FSDP1 and FSDP2"
	@echo "make dist             sdist and wheel in dist/, each tried in an empty environment"
	@echo "make clean            remove $(VENV), caches and build leftovers"

# A stamp says what an environment holds: it is younger than the lock, or the installation runs again.
# torch comes first and by its exact version: a range would let pip choose the newest build, with gigabytes of CUDA packages.
# The package is built by the setuptools that the lock names, hence no isolation.
$(VENV)/.installed: $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "shardeddp needs Python >= 3.10, $(PYTHON) is older or missing: set PYTHON=python3.x"; exit 1; }
	@echo "installing into $(VENV) (once, a minute or more)"
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH) setuptools
	$(INSTALL) --quiet --no-build-isolation --editable '.[demo]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(INSTALL) --quiet --no-build-isolation --editable '.[test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(INSTALL) --quiet --no-build-isolation --editable '.[test,dev]'
	@touch $@

$(VENV)/.installed-models: $(VENV)/.installed-test
	$(INSTALL) --quiet --no-build-isolation --editable '.[test,models]'
	@touch $@

$(VENV)/.installed-stores: $(VENV)/.installed-test
	$(INSTALL) --quiet --no-build-isolation --editable '.[test,stores]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) --quiet --no-build-isolation --editable '.[demo,docs]'
	@touch $@

# An environment that holds one release of Lightning, and what that needs otherwise, in front of the packages of $(VENV).
$(VERSIONS)/%/.installed: $(VENV)/.installed-test
	@rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/locked.pth"
	@grep -vE '^(lightning|pytorch-lightning|fsspec)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet -c $(@D)/constraints.txt \
	    lightning==$* pytorch-lightning==$*
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/train_gpt.py fit --config configs/laptop.yaml

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PARALLEL) $(CASES) -m "slow and not torture and not cluster and not models and not stores and not fidelity$(if $(SAMPLE), and not long)"

test-all: test test-slow test-models test-stores test-fidelity

test-versions: $(LIGHTNINGS:%=$(VERSIONS)/%/.installed)
	@for version in $(LIGHTNINGS); do \
	    found=$$($(VERSIONS)/$$version/bin/python -c 'import lightning; print(lightning.__version__)'); \
	    echo "lightning $$found"; test "$$found" = "$$version" || exit 1; \
	    $(VERSIONS)/$$version/bin/python -m pytest -q $(PARALLEL) $(CASES) -m "not torture and not cluster" $(SMOKE) || exit 1; \
	done

test-stores: $(VENV)/.installed-stores
	$(BIN)/python -m pytest $(CASES) -m "stores and not torture" tests/checkpoint/test_remote_directory.py tests/lightning/test_stores.py

test-models: $(VENV)/.installed-models
	$(BIN)/python -m pytest $(PARALLEL) $(CASES) -m models tests/models

test-cluster: $(VENV)/.installed-test
	@tests/cluster/install
	$(BIN)/python -m pytest $(CASES) -m "cluster and not torture" tests/cluster

test-fidelity: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PARALLEL) $(CASES) -m "fidelity and not torture$(if $(SAMPLE), and not long)" tests/fidelity

torture: $(VENV)/.installed-stores
	$(BIN)/python -m pytest -m "torture and not cluster"

torture-cluster: $(VENV)/.installed-test
	@tests/cluster/install
	$(BIN)/python -m pytest -m "torture and cluster" tests/cluster

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# Pictures in docs/images and tables in docs/configuration.md are committed; `python docs/pictures.py` and `python docs/options.py`
# make them again.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/site/index.html"

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/step_time.py

# Built by the setuptools of $(VENV), without a further tool. The wheel is installed into an environment that holds nothing else,
# where the command line answers and the marker of types is there; the sdist has to make the same wheel.
dist: $(VENV)/.installed
	@rm -rf build dist
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist"); build_meta.build_wheel("dist")'
	$(PIP) wheel --quiet --no-deps --no-index --no-build-isolation --wheel-dir dist/from-sdist dist/*.tar.gz
	@$(BIN)/python -c 'import sys, zipfile; \
	    one, other = ({it.filename: it.CRC for it in zipfile.ZipFile(path).infolist()} for path in sys.argv[1:]); \
	    sys.exit("the sdist makes another wheel" if one != other else 0)' dist/*.whl dist/from-sdist/*.whl
	$(BIN)/python -m venv dist/empty
	dist/empty/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-index dist/*.whl
	@dist/empty/bin/python -c 'from importlib.util import find_spec; from pathlib import Path; \
	    assert (Path(find_spec("shardeddp").origin).parent / "py.typed").is_file(), "not typed"'
	dist/empty/bin/shardeddp --version
	@rm -rf build dist/empty dist/from-sdist

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
