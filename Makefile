# Everything here needs Python (3.10 or newer) and make, nothing else: each target first makes what it needs in .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
ARGS   ?=
# The tests mostly wait for processes that they started: more of them at a time than there are cores. 0: in this process.
JOBS   ?= 8
# A test that needs a second chance has a fault. RERUNS=1 gives one, and names such tests at the end of the run.
RERUNS ?= 0
# With --reruns, even with 0, each test asks the first process over a socket, which takes 45 ms.
attempts = $(if $(filter-out 0,$(RERUNS)),--reruns $(RERUNS))
SINCE  ?= HEAD
PORT   ?= 8000
APP    ?= django

# Another interpreter than that of $(VENV) is asked for: then it is made anew.
which = $(shell $(1) -c 'import sys; print(sys.base_prefix, sys.hexversion)' 2>/dev/null)
ifneq ($(filter command environment,$(firstword $(origin PYTHON))),)
ifneq ($(wildcard $(BIN)/python),)
ifneq ($(call which,$(PYTHON)),$(call which,$(BIN)/python))
.PHONY: $(VENV)/.created
endif
endif
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help test quick test-all pytest proof matrix lint format types contracts docs site links linkcheck recording wheel dist demo serve bench clean

help:  ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  PYTHON=python3.12     the interpreter for $(VENV) (python3)"
	@echo "  JOBS=8                so many test files at a time; 0 for one process, as pdb needs it"
	@echo "  SINCE=main            for quick: what has changed since then (the last commit)"
	@echo "  RERUNS=1              a second chance for a test that fails"
	@echo "  ARGS='-k claim'       more arguments for pytest, the demo or the benchmark"
	@echo "  APP=fastapi           for serve: the payments API by FastAPI instead of Django"
	@echo "  EVENTS=path           for the demo: the file to take its events from"
	@echo "  STORE=django          for the demo: where the records are, redis (or nothing), django or hybrid"

# Types need one core for fifteen seconds: they are looked at beside the tests, and reported after them.
test: lint contracts  ## lint and import contracts, then the tests against the built wheel, and beside them types
	@$(BIN)/mypy > $(VENV)/beside.log 2>&1 & beside=$$!; \
	$(MAKE) --no-print-directory pytest; tests=$$?; \
	wait $$beside; beside=$$?; cat $(VENV)/beside.log; exit $$((tests || beside))

# What has changed since SINCE, and is not committed. Tests that start workers are left to `make test`.
quick: wheel  ## under a minute: style, types, and the tests of what changed: make quick SINCE=main
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy > $(VENV)/beside.log 2>&1 & beside=$$!; \
	{ git diff --name-only $(SINCE); git ls-files --others --exclude-standard; } | xargs $(BIN)/python -m tests.mutants --tests-of \
	    | xargs --no-run-if-empty $(BIN)/pytest -q -n 2 -m "not worker and not wide" $(ARGS); tests=$$?; \
	wait $$beside; beside=$$?; cat $(VENV)/beside.log; exit $$((tests || beside))

test-all: export MARKED = -m "wide or not wide"
test-all: export CELERY_IDEMPOTENT_THOROUGH = 1
test-all: test  ## as test, with what it leaves out: isolation levels, the whole contract on every server, soak: half an hour

pytest: wheel $(VENV)/.compiled  ## the tests alone: make pytest ARGS='tests/unit -k claim'
	@PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(JOBS) $(attempts) -r aR $(MARKED) $(ARGS)

proof: wheel  ## what is proven, in one table: a quarter of an hour, or make proof ARGS='--full --seed 7'
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m tests.proof $(ARGS)

# tox looks for interpreters on the PATH: pyenv's are put there.
matrix: $(VENV)/.dev  ## the oldest and the newest of all that is supported, on each Python that is here: an hour
	@PATH="$$(printf '%s:' $(HOME)/.pyenv/versions/3.*/bin)$$PATH" JOBS=$(JOBS) $(BIN)/tox run -m matrix $(if $(ARGS),-- $(ARGS))

lint: $(VENV)/.dev  ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev  ## put the style right, and what pages have from the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m docs.generated

types: $(VENV)/.dev  ## mypy, strict
	$(BIN)/mypy

contracts: $(VENV)/.dev  ## who may import whom
	$(BIN)/lint-imports --no-logo

# Every warning is an error: a link that leads nowhere, a page that is in no table of contents.
docs: $(VENV)/.dev  ## build the site of the documentation: open docs/_build/html/index.html
	@$(BIN)/sphinx-build --quiet --nitpicky --fail-on-warning --keep-going -b html docs docs/_build/html

site: $(VENV)/.dev  ## the same for every release, with a menu of versions: docs/_build/site
	@$(BIN)/python docs/all_versions.py docs/_build/site

links: $(VENV)/.dev  ## as docs, and write nothing: three seconds
	@$(BIN)/sphinx-build --quiet --nitpicky --fail-on-warning --keep-going -b dummy docs docs/_build/dummy

linkcheck: $(VENV)/.dev  ## ask every address that the documentation links to: needs the network
	@$(BIN)/sphinx-build --quiet --nitpicky -b linkcheck docs docs/_build/linkcheck

# A demo that fails is not recorded.
recording: $(VENV)/.dev $(VENV)/.demo  ## run the demo and record its terminal: the picture of the README
	@$(BIN)/python docs/recording.py docs/_static/demo.svg make demo

wheel: $(VENV)/.dev  ## build the wheel of what changed and install it in .venv: it is what the tests test
	@{ [ -e $(VENV)/.wheel ] && [ -z "$$(find $(PACKAGED) -newer $(VENV)/.wheel)" ]; } || { \
	    $(build-wheel) && $(PIP) install --quiet --no-deps --force-reinstall dist/*.whl && touch $(VENV)/.wheel; }

# With the time of the last commit on every file, a build of it is the same everywhere, byte for byte.
dist: $(VENV)/.release  ## sdist and wheel for the package index, checked: dist/
	@rm -rf build dist *.egg-info
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --outdir dist . > $(VENV)/dist.log \
	    || { cat $(VENV)/dist.log; exit 1; }
	@rm -rf build *.egg-info
	@$(BIN)/twine check --strict dist/*

demo: $(VENV)/.demo  ## the demonstration: make demo STORE=django EVENTS=path
	@$(if $(EVENTS),EVENTS="$(EVENTS)") $(if $(STORE),STORE="$(STORE)") $(BIN)/python -m testproject.demo $(ARGS)

serve: $(VENV)/.demo  ## the test project with all it needs, to try by hand: make serve PORT=8000
	@exec env PORT="$(PORT)" APP="$(APP)" $(BIN)/python -m testproject.serve

bench: $(VENV)/.bench  ## the benchmark
	@$(BIN)/python -m benchmarks $(ARGS)

clean:  ## remove .venv and whatever was built
	rm -rf $(VENV) .tox build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What a build left behind would find its way into the next wheel: start clean, leave clean.
build-wheel = rm -rf build dist *.egg-info \
    && $(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . \
    && rm -rf build *.egg-info

# The test processes would each compile what they all import: one does it before them, beside the type checker.
$(VENV)/.compiled: $(VENV)/.dev
	@PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --collect-only -qq > /dev/null || true
	@touch $@

# What the wheel is made of. A folder is newer once a file was removed from it.
PACKAGED := celery_idempotent setup.cfg setup.py pyproject.toml MANIFEST.in README.md LICENSE

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	    echo "There is no $(PYTHON) here. Install Python 3.10 or newer, or say which: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "Python 3.10 or newer is needed, $(PYTHON) is older. Say which: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments: it lacks ensurepip or venv." >&2; \
	    echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --quiet --upgrade 'pip>=25.1' 'setuptools>=77'
	@touch $@

# The stamps: a second run installs nothing, a changed requirement does. A file is compiled when it is imported: most never are.
$(VENV)/.dev $(VENV)/.demo $(VENV)/.bench $(VENV)/.release: $(VENV)/.%: $(VENV)/.created setup.cfg pyproject.toml
	@$(build-wheel) && $(PIP) uninstall -qqq --yes celery-idempotent && touch $(VENV)/.wheel
	$(PIP) install --quiet --no-compile "$$(echo dist/*.whl)[hiredis,opentelemetry,prometheus,rest]" --group $*
	@touch $@
