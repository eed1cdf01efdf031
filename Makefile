# Everything is installed into .venv; a stamp per extra keeps re-runs fast.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow test-gpu test-browser check format clean

demo: .venv/.installed-lab
	$(BIN)/python -m evenstep demo

test: .venv/.installed-dev
	$(BIN)/python -m pytest -q -n 2

test-slow: .venv/.installed-dev
	$(BIN)/python -m pytest -q -m slow

test-browser: .venv/.installed-dev
	$(BIN)/python -m pytest -q -m browser tests/test_lab_browser.py

test-gpu: .venv/.installed-dev
	$(BIN)/python -m pytest -q -m gpu

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing evenstep[$*] into .venv ..."
	@$(INSTALL) -e ".[$*]"
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv
