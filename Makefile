# Every target makes the environment that it needs, once, and again when pyproject.toml or constraints.txt changed.
#   make demo       photos through the encoders, beside recorded outputs of PyTorch (no torch installed)
#   make test       what needs no accelerator        make test-all    and the slow ones
#   make test-next  a quick part of it without torch, on Python 3.12 and the newest jax
#   make lint       ruff and basedpyright            make clean       remove environments and build outputs

VENVS := .venv
# The compiled executables of this clone stay in it.
export JAXVIT_STORE ?= $(CURDIR)/buckets/store
# The first Python of at least 3.11 that can make environments; PYTHON=... and PYTHON_NEXT=... choose another.
find = $(firstword $(foreach p,$(2),$(shell $(p) -c 'import ensurepip, sys, venv; sys.exit(not $(1))' 2>/dev/null && echo $(p))))
pyenv = $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/$(1)*/bin/python3)
PYTHON ?= $(call find,(3, 11) <= sys.version_info,python3 python3.11 python3.12 python3.13 $(call pyenv,3.11) $(call pyenv,3.12))
PYTHON_NEXT ?= $(call find,sys.version_info[:2] == (3, 12),python3.12 python3 $(call pyenv,3.12))

PIP := -m pip install -qq --disable-pip-version-check --constraint constraints.txt
FULL := $(VENVS)/full/bin/python
# Files go to WORKERS processes, each whole: a process compiles the tiny encoders of its files once.
WORKERS ?= 2
SPREAD = -n $(WORKERS) --dist loadfile
# What a newer jax or Python is likeliest to break.
QUICK := tests/layers tests/buckets/test_dispatcher.py tests/buckets/test_executable.py tests/buckets/test_store.py \
  tests/buckets/test_devices.py tests/models/test_packing.py tests/test_numerics.py tests/test_demo.py tests/weights/test_load.py
NEXT := $(VENVS)/next/bin/python

.PHONY: demo test test-all test-next lint format wheel clean env-demo env-full env-next

demo: $(VENVS)/demo/.made
	$(VENVS)/demo/bin/jaxvit demo $(ARGS)
	@echo "A picture of your own: $(VENVS)/demo/bin/jaxvit show weights/tiny/qwen2_5_vl photo.jpg -o map.png"

test: $(VENVS)/full/.made
	JAXVIT_FULL=1 $(FULL) -m pytest $(SPREAD) $(ARGS)

test-all: $(VENVS)/full/.made
	JAXVIT_FULL=1 $(FULL) -m pytest $(SPREAD) -m "not gpu" $(ARGS)

test-next: $(VENVS)/next/.made
	$(NEXT) -m pytest $(SPREAD) -m "not slow and not gpu and not reference" $(or $(ARGS),$(QUICK))

lint: $(VENVS)/full/.made
	$(FULL) -m ruff check .
	$(FULL) -m ruff format --check .
	$(FULL) -m basedpyright --pythonpath $(FULL)

format: $(VENVS)/full/.made
	$(FULL) -m ruff check --fix .
	$(FULL) -m ruff format .

wheel: $(VENVS)/demo/.made
	rm -rf dist
	$(VENVS)/demo/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENVS) build dist .pytest_cache .ruff_cache .hypothesis buckets/store weights/tiny
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

env-demo: $(VENVS)/demo/.made
env-full: $(VENVS)/full/.made
env-next: $(VENVS)/next/.made

# $(call environment,name,python,extras): an environment that is there already is brought up to date, not made anew.
define environment
	@$(VENVS)/$(1)/bin/python -m pip --version >/dev/null 2>&1 || { \
	  test -n "$(2)" || { echo "jaxvit needs Python $(4) with the venv module; name one: make $(5)=/path/to/python" >&2; exit 1; }; \
	  echo "making $(VENVS)/$(1) with $(2) ($(6))"; $(2) -m venv --clear $(VENVS)/$(1); }
	$(VENVS)/$(1)/bin/python $(PIP) --editable '.$(3)'
	@touch $@
endef

$(VENVS)/demo/.made: pyproject.toml constraints.txt
	$(call environment,demo,$(PYTHON),[plots],3.11 or later,PYTHON,about a minute)

$(VENVS)/full/.made: pyproject.toml constraints.txt
	$(call environment,full,$(PYTHON),[compare$(,)video$(,)plots$(,)ray$(,)test$(,)lint],3.11 or later,PYTHON,minutes: torch is large)

$(VENVS)/next/.made: pyproject.toml constraints.txt
	$(call environment,next,$(PYTHON_NEXT),[video$(,)plots$(,)test],3.12,PYTHON_NEXT,about a minute)

, := ,
