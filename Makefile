# Iterscope's commands; `make help` lists them. `make run` and `make test` each work alone on a fresh
# clone, twice in a row, from any folder and without root (the Debian packages of tests aside).
# Paths are relative and programs run as `python -m`, so that a space in the folder's name is harmless.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
.NOTPARALLEL:

PYTHON ?= python3
ARGS ?=

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input

# Stamps carry checksums of the folder and of what is asked for: when nothing changed, nothing is
# installed and no network is needed; a moved folder or a changed pin is noticed whatever the dates say.
PLACE := $(shell pwd | cksum | cut -d ' ' -f 1)
PINS := $(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
VENV := .venv/stamp-venv-$(PLACE)
INSTALLED := .venv/stamp-run-$(PLACE)-$(PINS)
INSTALLED_TEST := .venv/stamp-test-$(PLACE)-$(PINS)

.PHONY: help
help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

.PHONY: run
run: $(INSTALLED) demo-model  ## install, fetch the demo model, serve on 127.0.0.1:8000 (ARGS="--port 8123 ...")
	@echo "== Starting the server"
	@exec .venv/bin/iterscope serve --host 127.0.0.1 --port 8000 $(ARGS)

.PHONY: test
test: tools-test $(INSTALLED_TEST) demo-model-tested libraries  ## install and run every test not marked soak (ARGS="tests/test_x.py ...")
	@echo "== Testing"
	@node --test --test-reporter=spec dashboard/tests/*.test.js
	@$(PY) -m pytest -m "not soak" -n 3 --dist loadfile --no-loadscope-reorder -rs $(ARGS)

.PHONY: check
check: tools-check $(INSTALLED_TEST)  ## formatting, lint, types, JavaScript syntax
	@echo "== Checking"
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	@find dashboard -name '*.js' -not -path '*/vendor/*' -print0 | while IFS= read -r -d '' file; do \
		node --input-type=module --check - < "$$file" || { echo "$$file: not valid JavaScript" >&2; exit 1; }; done

.PHONY: soak
soak: tools-test $(INSTALLED_TEST) demo-model-tested libraries  ## the long proofs, minutes to hours
	@$(PY) -m pytest -m soak -rs -o faulthandler_timeout=14400 $(ARGS)

.PHONY: clients
clients: $(INSTALLED_TEST)  ## run guidellm and aiperf unmodified against our server, each in a venv of its own (gigabytes)
	@mkdir -p .venv-clients
	@$(PY) -c 'import pathlib; from tests import tiny; tiny.write(pathlib.Path(".venv-clients/tiny"))'
	@$(PY) -m bench.clients --model .venv-clients/tiny $(ARGS)

.PHONY: wheel
wheel: $(INSTALLED)  ## build a wheel that needs no compiler where it is installed, into dist/
	@$(PIP) wheel --no-deps --wheel-dir dist .

.PHONY: demo-model demo-model-tested
demo-model: $(INSTALLED)  ## fetch the demo model into the user's cache folder
	@$(PY) -m server.demo

demo-model-tested: $(INSTALLED_TEST)
	@$(PY) -m server.demo

.PHONY: libraries
libraries: $(INSTALLED_TEST)  # of every kind of CPU: tests keep to each
	@$(PY) -c 'from kernels import native; native.prebuild(native.SOURCES / "build")'

$(VENV):
	@echo "== Making .venv"
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or later is needed; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 1; }
	@if $(PIP) --version >/dev/null 2>&1; then "$(PYTHON)" -m venv .venv; \
		else "$(PYTHON)" -m venv --clear .venv; fi
	@rm -f .venv/stamp-*; touch $@

$(INSTALLED): $(VENV)
	@echo "== Installing Iterscope and what it runs on (once; about a minute and 1.3 GB on a CPU machine)"
	@$(PIP) install -e . -c constraints.txt
	@rm -f .venv/stamp-run-* .venv/stamp-test-*; touch $@

$(INSTALLED_TEST): $(VENV)
	@echo "== Installing Iterscope with what its tests need (once; about two minutes and 2.4 GB on a CPU machine)"
	@$(PIP) install -e '.[test]' -c constraints.txt
	@rm -f .venv/stamp-run-* .venv/stamp-test-*; touch "$(INSTALLED)" $@

# Programs that come from Debian, as program:package. Root gets them installed; anyone else is told.
.PHONY: tools-check tools-test
tools-check: TOOLS := node:nodejs
tools-test: TOOLS := node:nodejs chromium:chromium c++:g++ prometheus:prometheus \
	prometheus-alertmanager:prometheus-alertmanager
tools-check tools-test:
	@missing=""; \
	for tool in $(TOOLS); do command -v "$${tool%%:*}" >/dev/null || missing="$$missing $${tool##*:}"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "Missing, needed by tests only: run as root 'apt-get install$$missing'" >&2; exit 1; fi; \
	echo "== Installing$$missing"; \
	apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $$missing
