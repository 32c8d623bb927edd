# `make demo` and `make test` need nothing before them but Linux and Python >= 3.10 with its venv module.
.DELETE_ON_ERROR:
.PHONY: demo test lint check-types unit test-aot test-gpu test-versions test-vllm lock clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.requirements-installed
REQUIREMENTS := requirements/dev.txt requirements/triton.txt pyproject.toml
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=

# One thread a worker: the suite's tensors are tiny and the workers share the cores.
unit test-aot test-gpu test-versions test-vllm: export OMP_NUM_THREADS := 1
unit test-aot test-gpu test-versions test-vllm: export MKL_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

demo: $(STAMP)
	$(BIN)/replayssm demo

# vLLM's CPU build needs Python 3.11.
test: lint check-types unit
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		$(MAKE) --no-print-directory test-vllm; \
	else \
		echo "$(PYTHON) is older than Python 3.11: the tests of the vLLM plugin are left out (make test-vllm PYTHON=python3.x)"; \
	fi

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

# Every entry of the launch tables for sm_100 as well as sm_90 (`unit`: sm_90, and each kernel once elsewhere).
test-aot: $(STAMP)
	REPLAYSSM_AOT=all $(BIN)/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS) tests/test_aot.py

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# The other end of the supported range, in a second environment: `make test-versions TRANSFORMERS=5.17.0`.
TRANSFORMERS ?= 5.17.0
TRITON ?= 3.6.0
VERSIONS_TESTS ?= tests
VERSIONS_VENV := .cache/venv-transformers-$(TRANSFORMERS)-triton-$(TRITON)
VERSIONS_STAMP := $(VERSIONS_VENV)/.requirements-installed

test-versions: $(VERSIONS_STAMP)
	$(VERSIONS_VENV)/bin/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS) $(VERSIONS_TESTS)

# The vLLM plugin on vLLM's CPU platform, in an environment of its own: Python 3.11 or newer, 3 GB.
VLLM_VENV := .cache/venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.requirements-installed

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS) tests/vllm_plugin

# A torch built for CUDA brings the Triton it was built with; any other torch gets the pinned one.
define make_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than Python 3.10; set PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --requirement requirements/dev.txt
	$(1)/bin/python -c 'import triton' 2>/dev/null || \
		$(1)/bin/python -m pip install --quiet --no-deps --requirement requirements/triton.txt
	$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
endef

$(STAMP): $(REQUIREMENTS)
	@echo "Installing the pinned versions into $(VENV) (a few minutes the first time)"
	$(call make_venv,$(VENV))
	@touch $@

$(VERSIONS_STAMP): $(REQUIREMENTS)
	$(call make_venv,$(VERSIONS_VENV))
	$(VERSIONS_VENV)/bin/python -m pip install --quiet "transformers==$(TRANSFORMERS)"
	$(VERSIONS_VENV)/bin/python -m pip install --quiet --no-deps "triton==$(TRITON)"
	@touch $@

# vLLM's CPU build asks for packages that text models do without, so its requirements are listed whole.
$(VLLM_STAMP): $(REQUIREMENTS) requirements/vllm.txt
	$(call make_venv,$(VLLM_VENV))
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --requirement requirements/vllm.txt
	@touch $@

# Rewrites requirements/dev.txt from pyproject.toml. CUDA packages are left to torch's own exact pins.
lock: $(STAMP)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate \
		--no-emit-package triton --extra dev pyproject.toml --output-file requirements/dev.txt
	sed -i -E "/^#|^(nvidia|cuda)-|== 'emscripten'|== 'win32'/d; s/ (;|and) sys_platform != 'emscripten'//; \
		s/^(torch==[0-9.]+)\+[a-z0-9]+/\1/" requirements/dev.txt

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
