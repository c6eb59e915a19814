# The targets need python3 (3.10 or newer), pip, make and git; everything else is installed into .venv.

BIN   := .venv/bin
STAMP := .venv/.installed
JOBS  ?= auto
# Interpreter of test-gpu: .venv if it exists, because GPU machines often have a torch of their own.
PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
# Number of processes of test-gpu, most of whose time is compilation.
SHARDS ?= 8
# Additional options for pytest, for example: make test-quick ARGS="-k causal -x"
ARGS  ?=
# One thread per process: the workers already use all cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: compile-check test-mutants help install browser demo test test-quick test-hf trackers test-trackers test-oldest test-faults test-fuzz slurm test-slurm test-gpu docs dist lint format bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(STAMP) ## Create .venv with the package (editable) and all extras

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

browser: $(STAMP) ## Install Chromium for the tests of the report: Debian's package as root, otherwise playwright's
	command -v chromium >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	  $(BIN)/playwright install chromium

test: $(STAMP) ## Run all tests that do not need a GPU
	$(PYTEST) -m "not gpu"

test-quick: $(STAMP) ## Run the tests that do not need a GPU and are not marked slow
	$(PYTEST) -m "not gpu and not slow"

# The oldest Transformers that mgk/hf supports, with its dependencies, in a folder that precedes .venv on PYTHONPATH.
OLD_HF := .venv/transformers-5.17

$(OLD_HF): $(STAMP)
	rm -rf $@ $@.tmp
	grep -vE '^(transformers|huggingface_hub)==' constraints.txt > $@.constraints
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $@.constraints --target $@.tmp "transformers==5.17.*"
	mv $@.tmp $@

test-hf: $(OLD_HF) ## Run the tests of mgk/hf under the Transformers of .venv and under 5.17
	$(BIN)/python -c "import transformers; print('Transformers', transformers.__version__)"
	$(PYTEST) tests/hf
	PYTHONPATH=$(OLD_HF) $(BIN)/python -c "import transformers; print('Transformers', transformers.__version__)"
	PYTHONPATH=$(OLD_HF) $(PYTEST) tests/hf

# mlflow and wandb in a folder that precedes .venv on PYTHONPATH: mlflow needs an older importlib_metadata than .venv has.
TRACKERS := .venv/trackers

$(TRACKERS): $(STAMP)
	rm -rf $@ $@.tmp
	grep -v '^importlib_metadata==' constraints.txt > $@.constraints
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $@.constraints --target $@.tmp \
	  "mlflow-skinny==3.17.*" "wandb==0.31.*"
	mv $@.tmp $@

trackers: $(TRACKERS) ## Install mlflow and wandb for test-trackers

test-trackers: $(TRACKERS) ## Run the tests of --logger mlflow and wandb with these packages, without a network connection
	PYTHONPATH=$(TRACKERS) OMP_NUM_THREADS=1 MLFLOW_DISABLE_TELEMETRY=true WANDB_ERROR_REPORTING=false \
	  $(BIN)/python -m pytest tests/training/test_trackers.py -k "mlflow or wandb" $(ARGS)

# The oldest torch of pyproject.toml with a NumPy of the same age, in a separate environment.
OLDEST := .venv/torch-2.6

$(OLDEST)/.installed: pyproject.toml constraints.txt
	python3 -m venv --clear $(OLDEST)
	grep -vE '^(torch|triton|numpy|sympy|ml_dtypes)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDEST)/constraints.txt \
	  "torch==2.6.*" "numpy==1.26.*" -e ".[dev]"
	touch $@

test-oldest: $(OLDEST)/.installed ## Run the tests that do not need a GPU under the oldest torch, 2.6
	$(PYTEST:$(BIN)/%=$(OLDEST)/bin/%) -m "not gpu"

test-faults: $(STAMP) ## Kill, stop and starve a run at every operation, damage its files, and write results/faults.csv
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults --results results/faults.csv

test-mutants: $(STAMP) ## Run the tests against copies with one wrong line each; writes results/mutants.csv (half an hour)
	$(BIN)/python -m tests.mutants $(ARGS)

# Without a GPU: the kernels are compiled for seven architectures and not run.
compile-check: $(STAMP) ## Compile kernels for every GPU architecture; writes results/compiled.csv (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/compile_check.py --out results/compiled.csv --page docs/hardware.md $(ARGS)

slurm: ## Install SLURM for test-slurm: Debian's packages (needs root)
	command -v slurmctld slurmd >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y -qq --no-install-recommends munge slurmctld slurmd slurm-client >/dev/null; }

test-slurm: $(STAMP) slurm ## Run a sweep on a SLURM of this machine while a job and the node are killed (needs root)
	$(BIN)/python -m tests.slurm $(ARGS)

test-fuzz: $(STAMP) ## Run every command on all bad inputs of tests/fuzz (an hour; a case of every class is in test)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(ARGS)

test-gpu: ## Run the tests marked gpu with PYTHON (default: .venv, otherwise python3) in SHARDS processes
	@mkdir -p build; for part in $$(seq $(SHARDS)); do \
	  $(PYTHON) -m pytest -m gpu --shard $$part/$(SHARDS) -p no:cacheprovider $(ARGS) > build/gpu-$$part.log 2>&1 & pids="$$pids $$!"; done; \
	status=0; for pid in $$pids; do wait $$pid || status=1; done; tail -n 1 build/gpu-*.log; \
	[ $$status = 0 ] || { grep -hE "^(FAILED|ERROR)" build/gpu-*.log; exit 1; }

demo: $(STAMP) ## Train softmax, and sMGK and softmax with half the heads, on short ListOps (two minutes on a CPU) and compare them
	$(BIN)/mgk compare demo --rows softmax:4,smgk:2,softmax:2 --out runs/demo-results --runs runs --data-dir runs/data

docs: $(STAMP) ## Build the documentation into build/docs and run its tutorials; warnings are errors
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -q -W --keep-going -b html -c docs -d build/doctrees . build/docs

# The installed wheel is tried in an environment without the clone on its path.
dist: $(STAMP) ## Build wheel and sdist into dist/, check them, and try the wheel in a clean environment
	rm -rf dist build/dist-env build/dist-demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	python3 -m venv build/dist-env
	build/dist-env/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(ls dist/*.whl)[train]"
	! $(BIN)/python -m zipfile --list dist/*.whl | grep experiments
	sed -n '/^```python/,/^```/{/^```/!p}' README.md > build/readme_example.py
	cd build && dist-env/bin/python -c "import mgk; print(mgk.__version__, mgk.__file__)" && dist-env/bin/python readme_example.py
	cd build && dist-env/bin/mgk --version && dist-env/bin/mgk --help > /dev/null && dist-env/bin/mgk recipes > /dev/null
	cd build && dist-env/bin/mgk compare demo --steps 20 --out dist-demo --data-dir dist-demo

lint: $(STAMP) ## Check style, formatting, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP) ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Measure speed and memory on the CPU and append to results/cpu.csv
	$(BIN)/python benchmarks/cpu.py

clean: ## Remove .venv, caches and build output
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
