# Needs Python 3.10 or newer and make, nothing else: every target makes and fills .venv where that is missing or out of date.
#   make test                   run the test suite
#   make gpu                    run the part of the suite that needs a GPU, on a machine that has one
#   make nodes                  run the part of the suite that starts several processes with torchrun, some minutes
#   make demo                   run the example: drafters trained by threads of one process
#   make bench                  measure against stock torch and cures by hand; results and plots in bench/
#   make lint                   ruff, format, mypy and pyright
#   make docs                   the site, into site/; a warning is an error
#   make package                wheel and source archive, installed and tried in an empty environment
#   make test TORCH=2.11.0      the same with another torch
#   make matrix VERSION=2.8.0   the suite and the doctor on one torch, in an environment of its own; result in matrix/
#   make matrix                 the same on each supported torch in turn, and the tables of all
SHELL := /bin/bash
.DELETE_ON_ERROR:

PYTHON ?= python3
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)

VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed-torch-$(TORCH)
CHECKED := $(wildcard src tests examples benchmarks)
DOCS := .venv-docs

# One environment of another torch at a time: each has 5 GB.
VERSIONS := 2.6.0 2.8.0 2.11.0 2.13.0 2.14.1 2.15.0

.PHONY: test gpu nodes demo bench lint docs package matrix clean

# Each of the tests' threads would start an OpenMP pool of its own.
test: export OMP_NUM_THREADS := 1
test: $(INSTALLED)
	$(RUN) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

gpu: export OMP_NUM_THREADS := 1
gpu: $(INSTALLED)
	$(RUN) -m pytest -m gpu --numprocesses 4

nodes: export OMP_NUM_THREADS := 1
nodes: $(INSTALLED)
	$(RUN) -m pytest -m nodes

demo: $(INSTALLED)
	$(RUN) examples/dflash/demo.py --restart

bench: $(INSTALLED)
	$(RUN) -m benchmarks.run --output bench

lint: $(INSTALLED)
	$(RUN) -m ruff check $(CHECKED)
	$(RUN) -m ruff format --check $(CHECKED)
	$(RUN) -m mypy $(CHECKED)
	$(RUN) -m pyright --pythonpath $(RUN)

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=true $(DOCS)/bin/mkdocs build --strict

package: export OMP_NUM_THREADS := 1
package: $(INSTALLED)
	$(RUN) tests/package.py

matrix: export OMP_NUM_THREADS := 1
ifdef VERSION
matrix: VENV := .venv-torch-$(VERSION)
matrix:
	$(MAKE) VENV=$(VENV) TORCH=$(VERSION) $(VENV)/.installed-torch-$(VERSION)
	$(VENV)/bin/python tests/matrix.py run matrix --numprocesses 2 --dist loadfile --no-loadscope-reorder
else
matrix: $(INSTALLED)
	failed=0; \
	for version in $(VERSIONS); do \
		$(MAKE) matrix VERSION=$$version || failed=1; \
		rm -rf .venv-torch-$$version; \
	done; \
	$(RUN) tests/matrix.py merge matrix | tee matrix/tables.md; \
	exit $$failed
endif

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(RUN) -m pip install --quiet --upgrade --constraint $(VENV)/constraints.txt pip # --group needs pip 25.1
	$(RUN) -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[example,tools]' --group dev --group recipes --group package
	touch $@

# Apart from the rest: the site is made from the source, without torch.
$(DOCS)/.installed: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --upgrade --constraint constraints.txt pip # --group needs pip 25.1
	$(DOCS)/bin/python -m pip install --quiet --constraint constraints.txt --group docs
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) .venv-torch-* bench build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
