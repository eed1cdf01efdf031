# Everything is installed into .venv; a stamp per extra keeps re-runs fast.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow test-gpu test-kernels test-torch test-browser test-integrations test-all compatibility compatibility-gpu rivals docs check format clean

demo: .venv/.installed-lab
	$(BIN)/python -m evenstep demo

test: .venv/.installed-dev
	$(BIN)/python -m pytest -q -n 2

test-slow: .venv/.installed-dev
	$(BIN)/python -m pytest -q -n 2 -m slow $(PYTEST_ARGS)

test-gpu: .venv/.installed-dev
	$(BIN)/python -m pytest -q -n 8 --dist worksteal -m gpu

# the report in Chromium, which is not a Python package: apt-get install chromium
test-browser: .venv/.installed-dev
	$(BIN)/python -m pytest -q -m browser -rs tests/test_lab_browser.py

test-integrations: .venv-integrations/.installed
	.venv-integrations/bin/python -m pytest -q -n 2 -m integrations tests/integrations $(PYTEST_ARGS)

# Triton's kernels without a GPU: by its interpreter, and built for one
test-kernels: .venv-kernels/.installed
	.venv-kernels/bin/python -m pytest -q -n 2 -m kernels tests/test_interpreted.py $(PYTEST_ARGS)

# another torch, as in: make test-torch TORCH=2.15.0 PYTHON=python3.12 (its package may bring gigabytes of CUDA)
test-torch:
	$(PYTHON) -m venv .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install -qq --disable-pip-version-check "torch==$(TORCH)" -e ".[test]"
	.venv-torch-$(TORCH)/bin/python -m pytest -q -n 2
	.venv-torch-$(TORCH)/bin/python -m pytest -q -n 2 -m slow tests/test_compile.py

test-all: test test-slow test-kernels test-integrations

FEATURES := -q -m "feature and not gpu" -o addopts="" --strict-markers
compatibility: .venv/.installed-dev .venv-integrations/.installed
	mkdir -p results/compatibility
	$(BIN)/python -m pytest $(FEATURES) -n 2 tests --features results/compatibility/core.json
	.venv-integrations/bin/python -m pytest $(FEATURES) -n 2 tests/integrations --features results/compatibility/integrations.json
	$(BIN)/python scripts/compatibility.py

compatibility-gpu: .venv/.installed-dev
	mkdir -p results/compatibility
	$(BIN)/python -m pytest -q -m "feature and gpu" -o addopts="" --strict-markers tests/test_graphs.py --features results/compatibility/gpu.json
	$(BIN)/python scripts/compatibility.py

# the site, in docs/_build; a warning is an error
docs: .venv/.installed-docs
	$(BIN)/python -m sphinx -q -W --keep-going -j auto -b html docs docs/_build

# rival optimizers for `evenstep compare`, in a folder that can be carried to a machine without network
rivals: .rivals/.installed

.rivals/.installed: scripts/rivals.txt | $(BIN)/python
	rm -rf .rivals
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-compile --target .rivals -r scripts/rivals.txt
	@touch $@

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing evenstep[$*] into .venv ..."
	@$(INSTALL) -e ".[$*]"
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

# trainers, and Triton, bring much: they get environments of their own
.venv-%/.installed: pyproject.toml constraints.txt
	@echo "Installing evenstep[test,$*] into .venv-$* ..."
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[test,$*]"
	@touch $@
