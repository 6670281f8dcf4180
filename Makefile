# The commands of the repository; the README explains them.

PYTHON ?= python3
BIN := .venv/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)

# Measured on 2 cores with PyTorch's wheel for CPUs.
define INSTALLS_TRAIN
@echo "Installing Evenload and what training needs into .venv: about 0.4 GB to download, 1.3 GB on disk, 2 minutes on 2"
@echo "cores beside the download. Where pip's index offers PyTorch with CUDA instead of for CPUs, several GB more."
@echo "(make demo then plans, measures and trains for about 3 minutes.)"
endef
define INSTALLS_DEV
@echo "Installing Evenload and what its tests need into .venv: about 0.6 GB to download, 2.0 GB on"
@echo "disk, 2 minutes on 2 cores beside the download. Where pip's index offers PyTorch with CUDA instead of for CPUs,"
@echo "several GB more. (make test then takes about twenty minutes.)"
endef

.PHONY: demo test test-rounding test-engines test-fast test-docs test-thorough test-torch check bench accuracy gpu wheel wheels docs site clean

demo: .venv/train  ## plan, measure and train: a small Llama on this machine's Python library, in two pipeline stages
	$(BIN)/python examples/stdlib_demo/run.py

# Processes by the hundred import the same modules; compiling those anew in each costs minutes. Compiling all that is
# installed costs minutes too: most of it is never imported, and what is, is compiled then.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

# One process a core; at most four, because each starts a pool of four ranks, which take cores from each other: with three
# on two cores the tests of tests/dist took a fifth longer.
TEST_PROCESSES := $(shell cores=$$(nproc); echo $$(( cores < 4 ? cores : 4 )))

# What the tests import is compiled once, while the checks run, instead of by every process of the tests.
test: .venv/dev  ## everything CI checks of code and pages: lint, types, import rules, tests, every command of the pages
	@$(BIN)/python -m pytest --collect-only -q >/dev/null & $(MAKE) --no-print-directory check; checked=$$?; wait; exit $$checked
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal --durations=15

# Of what holds float64 results to 1e-9 or tighter, so much that every mechanism is in it.
ROUNDING_TESTS := $(addprefix tests/,attention/test_range_attention.py check/test_exact_casts.py \
  runtime/test_architectures.py runtime/test_replay.py runtime/test_lora.py integrations/test_packed_training.py \
  integrations/test_trainer.py integrations/test_trl.py dist/test_context_attention.py \
  dist/test_flexpipe_training.py::test_the_layout_follows_the_lengths_and_a_resumed_run_decides_alike)

test-rounding: .venv/dev  ## the exactness tests as a processor without vector units rounds; 2 minutes on 2 cores
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal \
	  $(ROUNDING_TESTS)

test-thorough: .venv/dev  ## whole sweeps over seeds and layouts, new random examples, every benchmark with --quick; an hour and more
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal --hypothesis-profile=explore

test-docs: .venv/dev  ## everything in the pages that is made: figures, outputs, tables, pictures; some minutes
	$(BIN)/python tools/make_pictures.py
	$(BIN)/python tools/make_configuration.py
	$(BIN)/python tools/make_glance.py
	$(BIN)/python tools/make_guide.py
	$(BIN)/python tools/make_tables.py
	$(BIN)/python tools/make_accuracy.py
	$(BIN)/python tools/make_file_tree.py
	$(MAKE) --no-print-directory site

site: .venv/dev  ## the documentation as a site, build/site; a link or heading that is not there is an error
	$(BIN)/mkdocs build --quiet

clean:
	rm -rf .venv build dist runs

.venv/bin/python:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Evenload needs Python 3.11 or later, {sys.executable} is {sys.version.split()[0]}; call make PYTHON=..."'
	$(PYTHON) -m venv .venv

.venv/train: .venv/bin/python $(SOURCES)
	$(INSTALLS_TRAIN)
	$(BIN)/python $(PIP_INSTALL) -e '.[train]'
	@touch $@

.venv/dev: .venv/bin/python $(SOURCES)  # holds all of .venv/train
	$(INSTALLS_DEV)
	$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	@touch .venv/train $@
