# make demo   code a real model, verify, decode, compare
# make test   the tests, on real models too where they can be had
# make lint   ruff and mypy
# make bench  the benchmarks
# make clean  remove the virtual environment, fetched models and caches
#
# pip takes its index and proxy settings from the environment.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
MODELS := benchmarks/models.py

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(PY):
	$(PYTHON) -m venv $(VENV)

# The stamps make the second run quick; a changed pyproject.toml installs again.
$(VENV)/.installed-%: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	touch $@

demo: $(VENV)/.installed-demo
	$(PY) benchmarks/demo.py

test: $(VENV)/.installed-test
	$(PY) $(MODELS) --optional smollm2 gemma reference-f16 reference-bf16
	$(PY) -m pytest -rs

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench: $(VENV)/.installed-test
	$(PY) $(MODELS) --optional smollm2 gemma
	set -e; for script in benchmarks/*_speed.py; do echo "== $$script"; $(PY) $$script; done

clean:
	rm -rf $(VENV) .cache .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
