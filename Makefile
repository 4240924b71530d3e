# Needs Python 3.11 or newer and make; everything else comes from the package index into .venv.
#   make demo        real training across processes, on this machine
#   make test        the tests            make check       format, lint, types
#   make test-all    those too that take long, and repeat with other settings what the others show
#   make bench       figures              make behaviours  which test shows which behaviour
#   make reference   docs from the code   make clean       remove what the targets above made
#   make docs        the pages of docs/ and of each public name, as a site in build/docs
#   make mutants     small faults, each of which the tests have to notice; some 15 minutes
#   make histories   random histories of a run with all faults, for MINUTES=10; a seed that fails can be played again
#   make fuzz        10,000 wrong answers of servers and publishers, to real sites; some minutes; ARGS="--answers 500"
#                    MINUTES=60: answers, requests to a server, messages, headers, policies and state files, for an hour
#   make compat     official programs of Flower and NVIDIA FLARE, unchanged; COMPAT_DIR has checkouts of both
#   make sbom        the parts of the wheel and of what it needs, in CycloneDX, in build/
#   make pythons     environments with other Pythons, for the tests of what needs no torch
#   make golden      write the digests of tests/behaviour/golden anew, and print old → new
# Another interpreter: make test PYTHON=python3.12.

PYTHON ?= python3
# Tests wait more than they compute: twice as many processes as the two cores of the usual machine.
JOBS ?= 4
PYTEST_ARGS ?=
DEMO_ARGS ?=
ARGS ?=
GB ?= 1
WORKERS ?= 4
ROUNDS ?= 4

VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start more than a thousand processes: without compiled files, each compiles all of Atoll for itself.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all check bench behaviours mutants histories fuzz compat sbom reference docs golden pythons clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python examples/demo/demo.py $(DEMO_ARGS)

test: $(VENV)/.test
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "not long" $(PYTEST_ARGS)

test-all: $(VENV)/.test
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tools/mypy.ini
	$(BIN)/mypy spec/specification.py
	$(BIN)/python tools/plain_words.py

bench: $(VENV)/.demo
	$(BIN)/python bench/round.py --gb $(GB) --workers $(WORKERS) --rounds $(ROUNDS)
	$(BIN)/python bench/bare_round.py --gb $(GB) --workers $(WORKERS) --rounds $(ROUNDS)
	$(BIN)/python bench/round_of_many_tensors.py

behaviours: $(VENV)/.test
	$(BIN)/python tools/behaviours.py

mutants: $(VENV)/.test
	$(BIN)/python tools/mutants.py

fuzz: $(VENV)/.test
	$(BIN)/python tools/fuzz.py $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

compat: $(VENV)/.test
	$(BIN)/python tools/compat.py $(COMPAT_DIR) --out docs/results/compat.md $(ARGS)

sbom: $(VENV)/.test
	$(BIN)/python tools/sbom.py

histories: $(VENV)/.test
	$(BIN)/python tools/histories.py --minutes $(or $(MINUTES),10) $(ARGS)

golden: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python tools/golden.py

pythons: $(VENV)/.test
	$(BIN)/python tools/pythons.py

reference: $(VENV)/.test
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/diagrams.py
	$(BIN)/python tools/api_pages.py
	$(BIN)/python tools/llms.py

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "Open build/docs/index.html."

clean:
	rm -rf $(VENV) .venv-3.* build dist docs/api/generated .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo $(VENV)/.test $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Atoll needs Python 3.11 or newer; PYTHON=$(PYTHON) is: $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	  echo "Name one that is: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) tools/install.py $*
	@touch $@
