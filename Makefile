# `make` or `make help` lists the targets.
PYTHON ?= python3.11
ENGINE ?= vllm
DEMO_ARGS ?=
SOAK_ARGS ?=
GPU_PYTHON ?= python3
BUNDLE_ARGS ?=
VERSIONS ?= vllm vllm-0.31 vllm-0.33-sources sglang sglang-0.5.22
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 600
AGAINST ?=
FUZZ_SEED := $(or $(FUZZ_SEED),$(shell date +%s))

BIN := .venv/bin
TRAINERS := .venv-trainers/bin
# Engines want all cores for themselves; what starts none takes turns on two. There each process has
# one thread: torch's would wait for each other in a loop, and take twice the time of both cores.
PARALLEL := -n 2 --dist worksteal
ENGINES := vllm sglang

# No hub, no usage statistics: tests and demo make their own small models.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
# The environments are installed uncompiled: each of an engine's processes would compile all that it
# imports again (SGLang: 29 s instead of 12 of one core).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup .venv-sglang .venv-trainers demo soak test test-fast test-slow test-all programs test-gpu gpu-bundle test-versions fuzz bench-gate lint format docs tables package clean clean-all

ifneq ($(filter demo soak,$(MAKECMDGOALS)),)
ifeq ($(filter $(ENGINES),$(ENGINE)),)
$(error ENGINE=$(ENGINE) is not known; make demo and make soak have: $(ENGINES))
endif
endif

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.11   the interpreter of the environments"
	@echo "  NAME=sglang         the environment of make setup: vllm, sglang, trainers, docs or an older engine's"
	@echo "  ENGINE=vllm         the engine of make demo and make soak, vllm or sglang"
	@echo "  DEMO_ARGS=...       goes to scripts.demo, SOAK_ARGS=... (--syncs 1000) to scripts.soak"
	@echo "  PYTEST_ARGS=...     goes to pytest"
	@echo "  BUNDLE_ARGS=...     goes to scripts.gpu.bundle (--python 3.12, --arch 90, --wheel FILE)"
	@echo "  VERSIONS=...        environments of make test-versions: $(VERSIONS)"
	@echo "  AGAINST=main        the commit that make bench-gate compares with; default: the newest tag v*, or else HEAD^"
	@echo "  FUZZ_SECONDS=600    how long make fuzz takes; FUZZ_SEED=... repeats one"

setup: ## make .venv with the pinned packages, or another environment with NAME=...
	@PYTHON="$(PYTHON)" scripts/setup_env.sh $(NAME)

.venv-sglang .venv-trainers: setup
	@PYTHON="$(PYTHON)" scripts/setup_env.sh $(@:.venv-%=%)

demo: setup $(if $(filter sglang,$(ENGINE)),.venv-sglang) ## update a live engine and check every weight
	@$(BIN)/python -m scripts.demo --engine $(ENGINE) $(DEMO_ARGS)

soak: setup $(if $(filter sglang,$(ENGINE)),.venv-sglang) ## 1000 syncs of a live engine under load: figures, and whether all is well
	@$(BIN)/python -m scripts.soak --engine $(ENGINE) $(SOAK_ARGS)

test: setup .venv-sglang .venv-trainers lint test-fast test-slow ## lint, and every test but those marked full (a workflow runs it daily)
	@echo "test: the tests that start engines, but for the full ones"
	@$(BIN)/python -m pytest -m "engine and not full" $(PYTEST_ARGS)

test-fast: setup ## the quick tests of those that start no engine
	@echo "test-fast: the tests that start no engine, but for the slow ones and those of the trainers"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not engine and not full and not slow" $(PARALLEL) $(PYTEST_ARGS)

test-slow: setup .venv-trainers ## the slow tests of those that start no engine, and those of the trainers
	@echo "test-slow: the slow tests of those that start no engine"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not engine and not full" $(PARALLEL) $(PYTEST_ARGS)
	@echo "test-slow: the trainers' tests that start no engine"
	@OMP_NUM_THREADS=1 $(TRAINERS)/python -m pytest tests/trainers -m "not engine and not full" \
		$(PARALLEL) $(PYTEST_ARGS)

test-all: programs setup .venv-sglang .venv-trainers lint test-fast test-slow ## lint, and every test; needs chromium, nginx and prometheus
	@echo "test-all: the tests that start engines, and the full ones"
	@$(BIN)/python -m pytest -m "engine or full" $(PYTEST_ARGS)
	@$(TRAINERS)/python -m pytest tests/trainers -m "engine or full" $(PYTEST_ARGS)
	@$(TRAINERS)/python -m pytest tests/verl $(PYTEST_ARGS)
	@$(TRAINERS)/python -m pytest tests/dashboard $(PYTEST_ARGS)

# Checked first: what needs them is at the end of hours of tests.
programs:
	@PATH="$$PATH:/usr/sbin"; for program in chromium nginx prometheus promtool; do \
		command -v $$program >/dev/null || { \
			echo "test-all: error: no $$program here; install Debian's packages:" \
				"apt-get install --no-install-recommends chromium nginx prometheus" >&2; exit 1; }; \
	done

test-gpu: ## the receiver's tests on a CUDA device, by GPU_PYTHON=python3
	@echo "test-gpu: placement, start-up, sync and kernels on cuda:0"
	@DELTA_TEST_DEVICE=cuda:0 OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -m "not engine and not full" -n 8 \
		$(addprefix tests/unit/,kernels model placement startup sync) $(PYTEST_ARGS)

gpu-bundle: setup ## vLLM for CUDA in a few pieces, for python -m scripts.gpu on a host without network
	@$(BIN)/python -m scripts.gpu.bundle $(BUNDLE_ARGS)

test-versions: setup ## the basics on every supported version of both engines
	@set -e; for name in $(VERSIONS); do \
		case $$name in *-sources) \
			folder=.venv-$$name; release=$${name%-sources}; \
			echo "test-versions: the Python sources of $$release.0"; \
			$(BIN)/python -m scripts.engine_sources $${release%-*}==$${release#*-}.0 $$folder; \
			PYTHONPATH=$(CURDIR)/$$folder:. OMP_NUM_THREADS=1 \
				$(BIN)/python -m pytest tests/unit/adapters $(PYTEST_ARGS); \
			continue;; \
		esac; \
		PYTHON="$(PYTHON)" scripts/setup_env.sh $$name; \
		folder=.venv-$$name; [ $$name != vllm ] || folder=.venv; \
		echo "test-versions: the engine of $$folder"; \
		case $$name in \
		vllm*) $$folder/bin/python -m pytest tests/live tests/patches -m versions -k vllm $(PYTEST_ARGS);; \
		sglang*) SGLANG_PYTHON=$(CURDIR)/$$folder/bin/python \
			$(BIN)/python -m pytest tests/live tests/patches -m versions -k sglang $(PYTEST_ARGS);; \
		esac; \
	done

fuzz: setup ## throw broken parts and requests at the receiver, for FUZZ_SECONDS=600
	@echo "fuzz: $(FUZZ_SECONDS) s, beginning with seed $(FUZZ_SEED)"
	@FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_SEED=$(FUZZ_SEED) \
		$(BIN)/python -m pytest -s tests/fuzz $(PYTEST_ARGS)

bench-gate: setup ## a short benchmark of this tree and of the last release, and whether a ratio is worse
	@$(BIN)/python -m scripts.bench.gate $(if $(AGAINST),--against $(AGAINST))

lint: setup ## ruff, import contracts, private attributes in tests, words, mypy
	@echo "lint: ruff check"
	@$(BIN)/ruff check .
	@echo "lint: ruff format"
	@$(BIN)/ruff format --check .
	@echo "lint: import contracts"
	@PYTHONPATH=.:server:trainer $(BIN)/lint-imports --no-logo
	@echo "lint: private attributes in tests"
	@$(BIN)/python -m scripts.check_private_uses
	@echo "lint: words"
	@$(BIN)/python -m scripts.check_words
	@echo "lint: mypy"
	@$(BIN)/mypy

format: setup ## let ruff format and fix the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: ## build the documentation into site/; needs no engine's environment
	@PYTHON="$(PYTHON)" scripts/setup_env.sh docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@echo "docs: site/index.html"

tables: setup ## write the tables of the documentation that are generated from the code
	@$(BIN)/python -m scripts.doc_tables --fast

package: setup ## build wheel and sdist, and try the wheel in an empty environment
	@PYTHON="$(PYTHON)" BUILD_PYTHON=$(BIN)/python scripts/try_package.sh

clean: ## remove build outputs and caches; clean-all: the environments too
	@rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv*' -not -path './.git/*' \
		-prune -exec rm -rf {} +

clean-all: clean
	@rm -rf .venv .venv-*
