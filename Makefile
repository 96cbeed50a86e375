# The verbs of the project. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := contracts $(wildcard libs/*) $(wildcard services/*)
STAMP := $(VENV)/.installed
GROUPS := build lint demo test
FAST := not integration and not slow and not long and not gpu and not clients and not cluster
SLOW := slow and not long and not integration and not gpu and not clients
ALL_ELSE := (integration or gpu) and not clients and not long
# Tests of one process each run beside each other, one more of them than cores: it uses the time in
# which others wait for a clock or a socket. Those with a broker or an engine have the machine to
# themselves.
BESIDE := -n $(shell expr 1 + `getconf _NPROCESSORS_ONLN`) --maxprocesses 9 --dist worksteal
# No test in these folders is run beside others, and loading them takes seconds.
ALONE := --ignore=tests/gpu --ignore=tests/integration --ignore=tests/clients --ignore=tests/containers \
	--ignore=tests/cluster
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test test-fast test-long test-clients test-cluster test-cluster-admission test-containers \
	storm storm-containers fuzz lint advisories contracts load images sbom lock clean

help:  ## List the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 32

setup: $(STAMP)  ## Make the virtual environment from the hashed lock

$(STAMP): requirements.lock $(addsuffix /pyproject.toml,$(PACKAGES))
	@deploy/setup.sh "$(PYTHON)" "$(VENV)" $(PACKAGES)
	@touch $@

demo: $(STAMP)  ## Run the demo: real Kafka, real SGLang, agents, training; RESUME=<run> continues one
	@$(BIN)/forgemq run deploy/demo/run.toml $(if $(RESUME),--resume $(RESUME)) $(ARGS)

test: $(STAMP)  ## Run all tests but the longest, on the real broker and the real engine
	@$(BIN)/python -m pytest -q $(BESIDE) -m "$(FAST)" $(ALONE) $(ARGS)
	@$(BIN)/python -m pytest -q $(BESIDE) -m "$(SLOW)" $(ALONE) --durations=15 $(ARGS)
	@$(BIN)/python -m pytest -q -m "$(ALL_ELSE)" --durations=15 $(ARGS)

test-fast: $(STAMP)  ## Run the tests that need neither broker nor engine
	@$(BIN)/python -m pytest -q $(BESIDE) -m "$(FAST)" $(ALONE) $(ARGS)

test-long: $(STAMP)  ## Run the longest tests: learning against its control, every point of gateways
	@$(BIN)/python -m pytest -q $(BESIDE) -m "long and not integration" $(ALONE) $(ARGS)
	@$(BIN)/python -m pytest -q -m "long and integration" $(ARGS)

test-clients: $(STAMP)  ## Run clients that others wrote; FORGEMQ_TEST_CLIENTS_LOG=kafka: on the real broker
	@$(BIN)/python -m tests.clients.install
	@$(BIN)/python -m pytest -q -m clients $(or $(ARGS),tests/clients)
	@$(BIN)/python -m tests.clients.table

test-cluster-admission: $(STAMP)  ## Apply every overlay to a real API server; compiles it once, needs Go, etcd, kubectl
	@$(BIN)/python -m tests.cluster.programs kube_apiserver
	@$(BIN)/python -m pytest -q -m cluster $(or $(ARGS),tests/cluster/test_admission.py)

test-cluster: $(STAMP)  ## Run the local overlay on a real Kubernetes node, and the scaling by KEDA; as root
	@$(BIN)/python -m tests.cluster.programs node
	@$(BIN)/python -m tests.cluster.go_modules
	@$(if $(BASE),BASE=$(BASE)) $(BIN)/python -m pytest -q -s -m cluster --durations=5 $(or $(ARGS),tests/cluster)

test-containers: $(STAMP)  ## Run the whole stack in containers, with kills; BASE=<base image>
	@$(if $(BASE),BASE=$(BASE)) $(BIN)/python -m pytest -q -m containers --durations=5 $(or $(ARGS),tests/containers)

storm: $(STAMP)  ## Simulate SEEDS=n schedules of each case; CASE=<name> FIRST=<seed> choose some
	@$(BIN)/python -m tests.simulation.storm --seeds $(or $(SEEDS),100) --first $(or $(FIRST),0) \
		$(if $(CASE),--case $(CASE))

storm-containers: $(STAMP)  ## Play SEEDS=n runs in containers in which things fail; FIRST=<seed>, BASE=<base image>
	@$(if $(BASE),BASE=$(BASE)) $(BIN)/python -m tests.containers.storm --seeds $(or $(SEEDS),3) \
		--first $(or $(FIRST),0) $(ARGS)

fuzz: $(STAMP)  ## Send a gateway BODIES=n wrong bodies of every protocol; FIRST=<number> chooses the first
	@$(BIN)/python -m tests.fuzz --bodies $(or $(BODIES),20000) --first $(or $(FIRST),0)

lint: $(STAMP)  ## Check format, lint, types and layers
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/lint-imports

advisories: $(STAMP)  ## Look the locked packages up in PyPI's advisory database; OSV=<url> asks a server of OSV's API
	@$(BIN)/python deploy/advisories/audit.py $(OSV)

contracts: $(STAMP)  ## Generate schemas and AsyncAPI from the structs
	@$(BIN)/python -m forgemq_contracts.generate

load: $(STAMP)  ## Run one load test: NAME=<file without .py> CASE=<one of its cases> JSON=<file>
	@KINETO_LOG_LEVEL=99 $(BIN)/python loadtests/$(NAME).py $(if $(CASE),--case "$(CASE)") $(if $(JSON),--json $(JSON))

images:  ## Build the container images: NAME=<one> builds it alone, TAG=<tag>, BASE=<base image>
	@TAG=$(TAG) BASE=$(BASE) deploy/images/build.sh $(NAME)

sbom: $(STAMP)  ## Write what each image holds, as CycloneDX, to build/sbom: NAME=<one>, TAG=<tag>
	@$(BIN)/python deploy/images/sbom.py build/sbom \
		$(or $(TAG),$(shell git rev-parse --short=12 HEAD)) $(NAME)

lock: $(STAMP)  ## Resolve the lock again
	$(BIN)/uv pip compile -q --python-version 3.11 --generate-hashes --no-header --override overrides.txt \
		pyproject.toml $(addprefix --group ,$(GROUPS)) -o requirements.lock
	$(BIN)/python deploy/images/lock.py

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache
