# make grid    from a fresh machine to report.html, within 20 minutes on two cores
# make test    from a fresh machine through the whole test suite
# make lint    ruff and mypy
# Each installs what it needs into $(VENV) first; a second call finds it installed.

VENV ?= .venv
GRID ?= smollm2
TIER ?= first
# From make's own words only: terminals export COLUMNS, their width.
given = $(if $(filter command,$(firstword $(origin $(1)))),$($(1)))
# More words for the grid's pytest (FLAGS="--grid-fresh") or the tests' (TESTS="tests/test_models.py -k twin").
FLAGS ?=
TESTS ?=

# The version that everything was measured on comes first; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)

.PHONY: install grid test lint clean
.DEFAULT_GOAL := grid

install:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 with venv found; give one: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python harness/install.py

grid: install
	$(VENV)/bin/python -m pytest --grid "$(GRID)" --grid-tier "$(TIER)" $(if $(call given,ROWS),--grid-rows "$(ROWS)") $(if $(call given,COLUMNS),--grid-columns "$(COLUMNS)") $(FLAGS)

# A test process that dies ends the run with its test's name: xdist, left to start another, hangs.
test: install
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 $(TESTS)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build *.egg-info
