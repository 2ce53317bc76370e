# Two commands are all a fresh machine needs: `make run` and `make test`. Each sets up what it uses.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

EXPERIMENT ?= mnist
TESTS      ?= tests
FUZZ_S     ?= 600
SEED       ?=
SCHEDULES  ?= 1000000

.PHONY: help install run test test-system test-all simulate chaos check format proto data clean bench-aggregation bench-noise bench-scale bench-recorder bench-latency bench-simulation bench-misbehaviour bench-attacks fuzz

help:
	@echo "make run          train: a parameter server, clients and adversaries on this machine (EXPERIMENT=$(EXPERIMENT))"
	@echo "make test         the tests, under ten minutes (TESTS=tests/unit for a part)"
	@echo "make test-system  the tests that take longer, or need Debian packages"
	@echo "make test-all     everything, the slow suite included"
	@echo "make simulate     random lives of a run, a thousand a second on each core (SCHEDULES=$(SCHEDULES) SEED=$(or $(SEED),0))"
	@echo "make chaos        every ready fault scenario in full, on every backend that works here (about half an hour)"
	@echo "make fuzz         hostile messages to a live parameter server and to clients (FUZZ_S=$(FUZZ_S) SEED=$(SEED))"
	@echo "make check        lint, types, layers"
	@echo "make bench-aggregation  time the rules beside their peers"
	@echo "make bench-noise  time the noise beside a whole round"
	@echo "make bench-latency  rounds beside Flower and a bare echo, ten minutes"
	@echo "make bench-simulation  a simulated round beside its gradients alone"
	@echo "make bench-recorder  what the record of a round costs"
	@echo "make bench-misbehaviour  what each misbehaviour costs the others (six minutes)"
	@echo "make bench-scale  a thousand connections beside a bare echo (about five minutes)"
	@echo "make bench-attacks  which attack breaks which rule (half an hour; may be stopped, and goes on)"
	@echo "make proto        regenerate the protocol's Python code"

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "byzuldp needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=…"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

data: install
	$(BIN)/byzuldp data mnist

run: install
	$(BIN)/byzuldp run $(EXPERIMENT)

test: install
	$(BIN)/python -m pytest -m 'not slow and not system' $(TESTS)

test-system: install
	$(BIN)/python -m pytest -m 'system and not slow' $(TESTS)

test-all: install
	$(BIN)/python -m pytest $(TESTS)

simulate: install
	$(BIN)/python tests/support/simulate.py --schedules $(SCHEDULES) --seed $(or $(SEED),0)

fuzz: install
	FUZZ_S=$(FUZZ_S) SEED=$(SEED) $(BIN)/python -m pytest -s -m slow \
	  tests/protocol/test_fuzzing.py tests/protocol/test_hostile_servers.py

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: install
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  proto/common/rpc/v1/*.proto

chaos: install
	$(BIN)/byzuldp chaos --all

bench-aggregation: install
	$(BIN)/python benchmarks/aggregation.py

bench-noise: install
	$(BIN)/python benchmarks/noise.py

bench-latency: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/latency.py

bench-simulation: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/simulation.py

bench-recorder: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/recorder.py

bench-misbehaviour: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/misbehaviour.py

bench-scale: install
	$(BIN)/python benchmarks/scale.py

bench-attacks: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/attacks.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
