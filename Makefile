# Needs Python 3.10 or newer and make, nothing else: every target makes and fills .venv where that is missing or out of date.
#   make test                   run the test suite
#   make demo                   run the example: drafters trained by threads of one process
#   make bench                  measure against stock torch
#   make lint                   ruff, format and mypy
#   make test TORCH=2.11.0      the same with another torch
SHELL := /bin/bash
.DELETE_ON_ERROR:

PYTHON ?= python3
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)

VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed-torch-$(TORCH)
CHECKED := $(wildcard src tests examples benchmarks)

.PHONY: test demo bench lint clean

# Each of the tests' threads would start an OpenMP pool of its own.
test: export OMP_NUM_THREADS := 1
test: $(INSTALLED)
	$(RUN) -m pytest --numprocesses 2 --dist loadfile

demo: $(INSTALLED)
	$(RUN) examples/dflash/demo.py

bench: $(INSTALLED)
	$(RUN) benchmarks/run.py

lint: $(INSTALLED)
	$(RUN) -m ruff check $(CHECKED)
	$(RUN) -m ruff format --check $(CHECKED)
	$(RUN) -m mypy $(CHECKED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(RUN) -m pip install --quiet --upgrade --constraint $(VENV)/constraints.txt pip # --group needs pip 25.1
	$(RUN) -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[example,tools]' --group dev
	touch $@

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
