# Ramet. Every target does its own set-up (.venv, dependencies, model) and is quick the second time.
#   make demo      a tool-using agent on a real model, with its prefix reuse shown
#   make test      lint, types and the whole test suite
#   make install   only the environment: .venv/bin/ramet, .venv/bin/python
#   make serve     the server on http://127.0.0.1:30000        (ARGS="--port 8000 ...")

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m
ARGS ?=
# A pip index with a CPU build of torch, for machines without an NVIDIA GPU:
#   make install TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# The first Python of at least 3.11; PYTHON=... names another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# What is installed, and compiled, depends on these files alone; a change of their content does it anew.
INSTALLED := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
COMPILED := $(VENV)/.compiled-$(shell cat constraints.txt kernels/build.py $(wildcard kernels/csrc/*) | cksum | cut -d' ' -f1)

.PHONY: help install model demo test lint types unit asan soak clients planner bench serve clean

help:
	@sed -n '1,5s/^# \{0,1\}//p' Makefile

install: $(COMPILED)

$(INSTALLED):
	@[ -n "$(PYTHON)" ] || { echo "Ramet needs Python 3.11 or newer; none was found. Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@if ! [ -x $(BIN)/python ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		rm -rf $(VENV); \
		"$(PYTHON)" -m venv $(VENV) || { echo "No virtual environment could be made; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	fi
	@echo "Installing into $(VENV) (once; a few minutes): pip"
	@# A pip that can resume a broken download.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	@echo "torch, the largest part$(if $(TORCH_INDEX), (from $(TORCH_INDEX)))"
	@# torch first and exactly pinned: a looser range can pull a build several gigabytes large.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
		"$$(grep -E '^torch==' constraints.txt)"
	@echo "everything else"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.installed-* && touch $@

# The native kernels, into the user's cache; without a compiler Ramet runs without them, more slowly.
$(COMPILED): $(INSTALLED)
	@$(BIN)/python -m kernels.build
	@rm -f $(VENV)/.compiled-* && touch $@

model: $(COMPILED)
	@$(BIN)/ramet pull --quiet $(MODEL)

demo: model
	@$(BIN)/python examples/agent_tools.py $(ARGS)

serve: model
	@exec $(BIN)/ramet serve --model $(MODEL) $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

# Tests run side by side, so each keeps to one thread of its own and sleeps where it waits for others.
PARALLEL := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4

unit: model
	$(PARALLEL) -m "not soak" $(ARGS)

test: lint types unit

# The native kernels built for AddressSanitizer (once; a few minutes), and all their tests on them.
asan: $(INSTALLED)
	RAMET_KERNEL_SANITIZE=1 ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest -m "not soak" tests/kernels/test_cpu_*.py tests/runtime/test_whole_step.py \
		--timeout 3000 $(ARGS)

soak: model
	$(PARALLEL) -m soak --timeout 3600 $(ARGS)

# Other people's clients and benchmarks, unmodified, against our server. Heavy to install, so not part of `make test`,
# and in an environment of its own: its packages come first, those of $(VENV) (torch and the like) after them.
CLIENTS := .venv-clients
CLIENTS_INSTALLED := $(CLIENTS)/.installed-$(shell cat pyproject.toml constraints.txt tests/clients/requirements*.txt | cksum | cut -d' ' -f1)

$(CLIENTS_INSTALLED): $(INSTALLED)
	@echo "Installing into $(CLIENTS) (once; a few minutes)"
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -c "import pathlib, sysconfig; \
		base = '$(abspath $(VENV))' + sysconfig.get_path('purelib').removeprefix('$(abspath $(CLIENTS))'); \
		pathlib.Path(sysconfig.get_path('purelib'), 'zz_base.pth').write_text(f'import site; site.addsitedir({base!r})')"
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/clients/requirements-alone.txt
	@command -v npm >/dev/null && npm install --silent --no-fund --no-audit --prefix $(CLIENTS)/npm @anthropic-ai/claude-code \
		|| echo "Without npm, Claude Code is not tried."
	@touch $@

clients: model $(CLIENTS_INSTALLED)
	PATH="$(abspath $(CLIENTS))/npm/node_modules/.bin:$$PATH" $(CLIENTS)/bin/python -m pytest tests/clients --timeout 900 $(ARGS)

# FlashInfer's own planner and signatures, without a GPU. The package's wheel is 100 MB, so not part of `make test`;
# needs nvcc (CUDA 13) on the path. PLANNER=... names a folder that has the package already.
PLANNER ?= .planner

planner: $(INSTALLED)
	@[ -d $(PLANNER)/flashinfer ] || $(BIN)/python -c 'import pathlib; from bench.gpu_carry import fetch; fetch(pathlib.Path("$(PLANNER)"))'
	PYTHONPATH=$(PLANNER) $(BIN)/python -m pytest -m planner -rs tests/kernels $(ARGS)

bench: model
	$(BIN)/ramet bench serve $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) .planner build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
