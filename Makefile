# Each target does all its own set-up; it needs Python 3.11 or newer, make, and the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TESTS := -m pytest -n 2 --dist worksteal  # two processes of one thread each

.PHONY: demo test test-slow test-lowest lint docs bench evidence clean

demo: $(VENV)/.installed  ## reconstruct a few images with the shipped weights
	$(BIN)/finola demo

test: $(VENV)/.installed-dev  ## the test suite but for the tests marked slow
	$(BIN)/python $(TESTS) -m "not slow"

test-slow: $(VENV)/.installed-dev  ## the tests marked slow, which seldom tell what the others do not
	$(BIN)/python $(TESTS) -m slow

test-lowest:  ## as test, with the oldest packages that pyproject.toml allows
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet -c lowest.txt -e '.[train,dev]'
	$(VENV)-lowest/bin/python $(TESTS) -m "not slow"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs  ## the documentation as a site in site/
	$(BIN)/python docs/build_site.py

evidence: $(VENV)/.installed-dev  ## the paper's claims anew, a day: make evidence DATA=train VAL=val COCO=coco128
	$(BIN)/python benchmarks/evidence.py --data $(DATA) --val $(VAL) --coco $(COCO)

bench: $(VENV)/.installed-dev  ## speed and memory of the operator on this machine
	$(BIN)/finola bench operator

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,dev,docs]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-docs

$(VENV)/.installed-docs: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest site
