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

# llama.cpp is compiled, for minutes, once. Where that fails its tests are skipped, with a reason, and the others run.
LLAMA := $(VENV)/.tried-llama
LLAMA_LOG := $(VENV)/llama.log

$(LLAMA): $(VENV)/.installed-test
	@echo "installing llama-cpp-python, which takes some minutes where it has to be compiled"
	@$(PY) -m pip install --disable-pip-version-check -e '.[llama]' >$(LLAMA_LOG) 2>&1 \
	  || echo "llama-cpp-python cannot be installed here ($(LLAMA_LOG) has the reason): its tests are skipped; to try again: rm $@"
	@touch $@

demo: $(VENV)/.installed-demo
	$(PY) benchmarks/demo.py

test: $(VENV)/.installed-test $(LLAMA)
	$(PY) $(MODELS) --optional smollm2 gemma reference-f16 reference-bf16
	$(PY) -m pytest -rs

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# A peer that is not to be had is left out, and the JSON says so. ZipNN brings PyTorch; `make bench PEERS=` does without it.
PEERS ?= zipnn
BENCHMARKS := sizes type_sizes codec_speed scalar_speed random_access memory coders llama_load capture decode_unit tuned \
  tuned_cost

bench: $(VENV)/.installed-test $(LLAMA)
	for peer in $(PEERS); do \
	  $(PY) -m pip install --quiet --disable-pip-version-check $$peer || echo "$$peer is not to be had: it is left out"; \
	done
	$(PY) $(MODELS) --optional smollm2 gemma reference-f16 reference-bf16
	$(PY) benchmarks/blocks_speed.py
	set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(PY) benchmarks/$$name.py; done
	$(PY) benchmarks/tables.py

clean:
	rm -rf $(VENV) .cache .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
