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

.PHONY: demo test test-rounding test-engines test-decoders test-fast test-docs test-thorough test-torches test-liger check bench accuracy gpu wheel wheels docs site clean

demo: .venv/train  ## plan, measure and train: a small Llama on this machine's Python library, in two pipeline stages
	$(BIN)/python examples/stdlib_demo/run.py

# Processes by the hundred import the same modules; compiling those anew in each costs minutes. Compiling all that is
# installed costs minutes too: most of it is never imported, and what is, is compiled then.
unexport PYTHONDONTWRITEBYTECODE
PIP_OTHER := -m pip install --quiet --no-compile --disable-pip-version-check
PIP_INSTALL := $(PIP_OTHER) -c constraints.txt

# One process a core; at most four, because each starts a pool of four ranks, which take cores from each other: with three
# on two cores the tests of tests/dist took a fifth longer.
TEST_PROCESSES := $(shell cores=$$(nproc); echo $$(( cores < 4 ? cores : 4 )))

# What the tests import is compiled once, while the checks run, instead of by every process of the tests.
test: .venv/dev  ## everything CI checks of code and pages: lint, types, import rules, tests, every command of the pages
	@$(BIN)/python -m pytest --collect-only -q >/dev/null & $(MAKE) --no-print-directory check; checked=$$?; wait; exit $$checked
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal --durations=15

# Of what holds float64 results to 1e-9 or tighter, so much that every mechanism is in it.
ROUNDING_TESTS := $(addprefix tests/,attention/test_range_attention.py \
  $(addprefix check/test_checks.py::,test_every_plan_equals_plain_training test_documents_are_isolated_to_the_bit \
    test_in_float64_the_verdict_does_not_depend_on_the_processor) \
  runtime/test_replay.py runtime/test_lora.py integrations/test_packed_training.py \
  integrations/test_trainer.py dist/test_context_attention.py \
  dist/test_flexpipe_training.py::test_the_layout_follows_the_lengths_and_a_resumed_run_decides_alike)

# oneDNN is limited, too: with matrix units that it finds, torch packs bfloat16 for instructions it was told not to use.
test-rounding: .venv/dev  ## the exactness tests as a processor without vector units rounds; 2 minutes on 2 cores
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest \
	  -n $(TEST_PROCESSES) --dist worksteal $(ROUNDING_TESTS)

test-thorough: .venv/dev  ## whole sweeps over seeds and layouts, new random examples, every benchmark with --quick; an hour and more
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal --hypothesis-profile=explore

test-docs: .venv/dev  ## README, tutorial and recipes as they stand; make test follows all pages on less data
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --hypothesis-profile=explore -k as_it_stands \
	  tests/docs/test_pages_followed.py

# Where the runtime touches what differs among versions of PyTorch: attention, replay, tensors without data; not which
# folders stay and who is silent. Those of ranks are left to make test-torches TORCH_TESTS="tests/dist/test_matrix.py ...".
SAME_IN_ALL_TORCHES := $(patsubst %,tests/runtime/test_%.py,best_checkpoints executor_refusals monitor \
  replaced_checkpoints watch)
TORCH_TESTS := tests/attention $(filter-out $(SAME_IN_ALL_TORCHES),$(wildcard tests/runtime/test_*.py))
# The oldest and the newest that pyproject.toml allows, the oldest with the oldest transformers; make test runs those of
# constraints.txt.
TORCHES := 2.11.0 2.15.0
BESIDE_2.11.0 := transformers==5.17.0 huggingface-hub==1.33.0

test-torches: $(TORCHES:%=test-torch-%)  ## what differs among versions of PyTorch, under the oldest and the newest; often 3 GB each

# An environment that holds PyTorch alone and sees all else through .venv. Settings of this machine's pip, which may
# name a newest PyTorch, are left out.
test-torch-%: .venv/dev
	[ -x .venv/torch-$*/bin/python ] || $(BIN)/python -m venv .venv/torch-$*
	$(BIN)/python tools/share_packages.py .venv/torch-$*
	PIP_CONFIG_FILE=/dev/null .venv/torch-$*/bin/python $(PIP_OTHER) torch==$*
	$(if $(BESIDE_$*),.venv/torch-$*/bin/python $(PIP_OTHER) --no-deps $(BESIDE_$*))
	.venv/torch-$*/bin/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -p no:cacheprovider $(TORCH_TESTS)

# Engines whose requirements contradict those of `dev`. Each environment holds what differs, and sees PyTorch and the
# rest through .venv.
TITAN := .venv/torchtitan
SEAMS := .venv/seams

test-engines: $(TITAN)/installed $(SEAMS)/installed  ## engines that cannot stand beside `dev`: torchtitan, verl, the newest Megatron-Core; 0.4 GB more
	$(TITAN)/bin/python -m pytest -n 0 --durations=5 tests/integrations/test_torchtitan_trainer.py
	$(SEAMS)/bin/python -m pytest -n 0 --durations=5 tests/seams/test_verl.py tests/seams/test_megatron_seam.py

# Half a minute on 2 cores, PyTorch being there.
$(TITAN)/installed: .venv/dev constraints-torchtitan.txt
	$(BIN)/python -m venv $(TITAN)
	$(BIN)/python tools/share_packages.py $(TITAN)
	$(TITAN)/bin/python $(PIP_OTHER) -c constraints-torchtitan.txt \
	  $$($(BIN)/python tools/share_packages.py --extra torchtitan)
	@touch $@

# Without what verl's functions on a batch do not need: vLLM, Weights & Biases and the rest of its requirements. Of
# Megatron-Core, which asks for Python 3.12, one file is read.
$(SEAMS)/installed: .venv/dev constraints-seams.txt
	$(BIN)/python -m venv $(SEAMS)
	$(BIN)/python tools/share_packages.py $(SEAMS)
	$(SEAMS)/bin/python $(PIP_OTHER) --no-deps -r constraints-seams.txt
	$(SEAMS)/bin/python $(PIP_OTHER) --no-deps --target $$(echo $(SEAMS)/lib/python3*/site-packages) \
	  --python-version 3.12 --ignore-requires-python --only-binary :all: megatron-core==0.19.2
	@touch $@

test-decoders: .venv/dev  ## every causal type of transformers that has no row yet, by stages and plainly; then docs/decoders.md; 5 minutes on 2 cores
	$(BIN)/python tools/sweep_decoders.py

# Triton is larger than everything else that the tests need. `make test-liger PROFILE=explore`: of all architectures.
LIGER := .venv/liger
PROFILE := repeatable

test-liger: $(LIGER)/installed  ## Liger's kernels in the interpreter of Triton, which takes 1 GB; a minute and a half
	$(LIGER)/bin/python -m pytest -n 0 --hypothesis-profile=$(PROFILE) tests/runtime/test_liger.py

$(LIGER)/installed: .venv/dev
	$(BIN)/python -m venv $(LIGER)
	$(BIN)/python tools/share_packages.py $(LIGER)
	$(LIGER)/bin/python $(PIP_INSTALL) --no-deps $$($(BIN)/python tools/share_packages.py --extra liger) triton==3.9.0
	@touch $@

# Everything that starts no training processes and no browser, follows and makes no page, and searches for no layout.
FAST := $(addprefix tests/,attention cost docs explore feed plan report runtime schedule stepplan types)

test-fast: .venv/dev  ## what one runs while working: about 2 minutes on 2 cores
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -q $(FAST) --ignore-glob '*_in_browser.py' \
	  $(addprefix --ignore tests/,docs/test_pages_followed.py docs/test_made_pages.py docs/test_reference.py \
	  explore/test_layout_search.py)

# ruff's cache does not notice that a module has moved between first and third party; a second without it.
check: .venv/dev  ## lint, format, types, import rules
	$(BIN)/ruff check --no-cache
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --summary=none
	$(BIN)/lint-imports

bench: .venv/dev  ## measure; appends rows to benchmarks/results
	$(BIN)/python benchmarks/run_all.py

accuracy: .venv/dev  ## strategies measured beside their predictions; rows to benchmarks/accuracy, then docs/accuracy.md
	$(BIN)/python benchmarks/measured.py --resume; measured=$$?; $(BIN)/python tools/make_accuracy.py && exit $$measured

gpu:  ## everything that only a CUDA GPU can show, beside the torch of PYTHON, in parts; 25 minutes at most
	$(PYTHON) tools/gpu_parts.py

wheel: .venv/dev  ## dist/: source distribution and wheel, installed and tried without a compiler and without torch
	$(BIN)/python tools/make_wheel.py

wheels: .venv/dev  ## for `make gpu` on a machine without a network: wheels/ for Python 3.12 on Linux
	$(BIN)/python tools/gpu_install.py --gather

docs: .venv/dev  ## everything in the pages that is made: figures, outputs, tables, pictures; some minutes
	$(BIN)/python tools/make_pictures.py
	$(BIN)/python tools/make_configuration.py
	$(BIN)/python tools/make_convergence.py
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
