# Each target sets up what it needs; the second time that costs nothing.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	--config-settings editable_mode=compat
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null

# The tests start hundreds of processes, and each would compile hcsim anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install sweep quick test soak check mac docs clean

install: $(READY)  ## hcsim into .venv

sweep: $(READY)  ## all studies at low resolution: tables and figures in results/quick/
	$(BIN)/python -m experiments.sweep --quick

quick: $(READY)  ## tests of every package, for every day
	$(BIN)/python -m pytest -n auto --dist worksteal --hypothesis-profile quick \
		-m "not slow and not soak and not namespaces_long"

test: $(READY)  ## the whole test suite
	$(BIN)/python -m pytest -n auto --dist worksteal

MINUTES ?= 60

soak: $(READY)  ## an hour of faults on a real cluster in network namespaces (Linux, root), and the longer tests
	$(BIN)/python -m experiments.soak --minutes $(MINUTES)
	$(BIN)/python -m pytest -m soak

check: $(READY)  ## lint, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

mac: $(READY)  ## what can be known of Macs anywhere: the C and the types for macOS, ranks spawned, small buffers
	$(BIN)/python -c 'import ziglang' 2>/dev/null || \
		$(PIP_INSTALL) -e '.[mac]'
	$(BIN)/python tests/mac.py
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin
	$(BIN)/python -m pytest -n auto --dist worksteal --like-a-mac -m "not slow and not soak and not namespaces_long" \
		tests/scripts tests/real/test_memory_between_processes.py

docs: $(READY)  ## the documentation, into site/
	$(BIN)/python -c 'import material, mkdocstrings_handlers.python' 2>/dev/null || \
		$(PIP_INSTALL) -e '.[docs]'
	$(BIN)/python docs/tools/architecture.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# compat: a plain path entry, so that a folder called hcsim beside somebody's script does not stand before the package.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard hcsim/compressors/kernels/*.[ch] hcsim/real/*.[ch] hcsim/real/shm/*.[ch])
	@$(BIN)/python $(NEW_ENOUGH) || $(PYTHON) $(NEW_ENOUGH) || \
		{ echo "hcsim needs Python >= 3.11, and $(PYTHON) is none: say which is, as in: make PYTHON=python3.12 test" >&2; exit 1; }
	$(BIN)/python $(NEW_ENOUGH) || { rm -rf .venv && $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }; }
	$(PIP_INSTALL) -e '.[dev,mlx]' || { \
		echo "MLX has no wheel for this system? Once more without: its tests are skipped" >&2; $(PIP_INSTALL) -e '.[dev]'; }
	touch $@

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
