# Every target sets up .venv by itself. A torch >= 2.11 that $(PYTHON) can import is reused; otherwise 2.13.0 is
# installed. Nothing installed later may replace it: requirements/present.py pins what is there.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# Hundreds of processes, most of them tests, import the package: none of them should compile it anew.
unexport PYTHONDONTWRITEBYTECODE
# For the libraries for torch, too, which a user's compiler builds without: a later one may warn of more.
export CXXFLAGS += -Werror

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP_COMMAND := $(RUN) -m pip --quiet --disable-pip-version-check
PIP := $(PIP_COMMAND) install
PINNED := --constraint requirements/constraints.txt --constraint $(VENV)/present.txt
HAS_TORCH := -c "import torch; exit(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 11))"

# Two workers with one thread each use two cores better than one worker with two: most tests are small. Each takes half
# of the files, so that a module's fixtures are made once, and the tests that the other has left at the end.
WORKERS ?= 2
PYTEST := $(RUN) -m pytest -n $(WORKERS) --dist worksteal
ARGS ?=
# Of random training programs in a sweep: 100,000 take about an hour of one core where none fails.
PROGRAMS ?= 100000
SOAKED := $(addprefix build/soak/seed-,$(shell seq 0 119))

LINTED := _pyactcomp_command.py _pyactcomp_startup.py bench docs/site examples pyactcomp requirements setup.py tests
NATIVE := CMakeLists.txt setup.py pyproject.toml pyactcomp.pth $(shell find csrc -type f)
FORMATTED := $(shell find csrc bench tests -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test slow sanitize lint bench docs examples wheel soak sweep clean

demo: $(VENV)/package
	$(RUN) -m pyactcomp demo $(ARGS)

test: $(VENV)/package $(VENV)/tools
	$(PYTEST) -m "not slow" $(ARGS)

# Compilers, sanitizers, several processes, trainers in compiled graphs: minutes.
slow: $(VENV)/package $(VENV)/tools
	$(PYTEST) -m slow $(ARGS)

# The library that packs and restores, under the address and undefined-behaviour sanitizers: three minutes.
sanitize: $(VENV)/package $(VENV)/tools
	$(RUN) -m pytest tests/test_sanitized.py $(ARGS)

lint: $(VENV)/package $(VENV)/tools
	$(RUN) -m ruff check $(LINTED)
	$(RUN) -m ruff format --check $(LINTED)
	$(RUN) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)

# The site in build/site; every warning is an error.
docs: $(VENV)/package $(VENV)/docs
	$(RUN) docs/site/drawings.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# Each example as it stands; timm's where timm is installed, whose torchvision has no build for the CPU on PyPI.
examples: $(VENV)/package $(VENV)/tools
	$(RUN) -m pytest tests/test_examples.py $(ARGS)

# A source distribution; one wheel without CUDA C++, which Triton makes up for, and one with it where nvcc is found. Then
# the wheels are installed where no compiler is on PATH. Both have the allocator and csrc, and are for this machine's
# Python. The one without CUDA C++ needs no library but those of manylinux and torch, and takes the tag of manylinux.
wheel: $(VENV)/package $(VENV)/tools $(VENV)/wheel
	rm -rf dist build/lib* build/bdist* build/wheel
	$(RUN) -m build --sdist --no-isolation --outdir dist . >/dev/null
	PAC_CUDA=OFF $(PIP_COMMAND) wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(abspath $(VENV))/bin:$$PATH" $(RUN) -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
	  --exclude 'libcudart*' --wheel-dir dist build/wheel/*.whl
	if command -v nvcc >/dev/null; then \
	  rm -rf build/lib* build/bdist*; PAC_CUDA=ON $(PIP_COMMAND) wheel --no-deps --no-build-isolation --wheel-dir dist .; \
	fi
	$(RUN) -m twine check --strict dist/*
	$(PYTEST) -q tests/test_wheel.py
	ls -l dist

bench: $(VENV)/package
	for suite in codec overhead mlp scaling frontier batch holds alloc breadth; do $(RUN) -m bench $$suite $(ARGS); done

# Too long for every test run: all samples of PyTorch's operators and modules in all layouts (some ten minutes for each
# dtype), random training programs (half an hour for 10,000), a hundred architectures in compiled graphs (forty
# minutes), and one step of every architecture (ten minutes).
sweep: $(VENV)/package $(VENV)/tools
	$(RUN) tests/operators.py
	$(RUN) tests/programs.py --count $(PROGRAMS) --workers $(WORKERS)
	$(RUN) tests/compiled_operators.py
	$(RUN) tests/compiled_programs.py --count 500
	$(RUN) tests/compiled_architectures.py
	$(RUN) -m bench breadth

# A hundred million random operations on the allocator's core, with pauses, tags, shared blocks and pools that die,
# under the address and undefined-behaviour sanitizers: half an hour of two cores. A second call goes on where the first
# stopped.
soak: $(VENV)/package
	$(VENV)/bin/cmake -S tests/cpp -B build/soak -GNinja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja \
	  -DSANITIZE=address,undefined
	$(VENV)/bin/cmake --build build/soak
	$(MAKE) --keep-going --jobs=$$(nproc) $(SOAKED)

# Of a seed that was run to the end with this program.
$(SOAKED): build/soak/seed-%: build/soak/allocator_stress
	$< --seed $* --operations 833334 --every 1000
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info pyactcomp/*.so pyactcomp/torch_libraries pyactcomp-demo .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(VENV)/torch: requirements/present.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=...")'
	@echo "making $(VENV); torch 2.13.0 is downloaded unless $(PYTHON) has one: minutes with a slow network"
	system=; if $(PYTHON) $(HAS_TORCH) 2>/dev/null; then system=--system-site-packages; fi; \
	$(PYTHON) -m venv $$system $(VENV)
	$(RUN) $(HAS_TORCH) 2>/dev/null || $(PIP) torch==2.13.0
	$(RUN) requirements/present.py > $(VENV)/present.txt
	touch $@

$(VENV)/package: $(VENV)/torch requirements/build.txt requirements/constraints.txt $(NATIVE)
	@echo "installing cmake, ninja, pybind11 and, for the allocator, CUDA's headers"
	$(PIP) $(PINNED) --requirement requirements/build.txt
	@echo "compiling pyactcomp: about a minute, with CUDA kernels three; two libraries for torch: half a minute each"
	$(PIP) $(PINNED) --no-build-isolation --editable '.[bench]'
	touch $@

$(VENV)/docs: $(VENV)/torch requirements/docs.txt requirements/constraints.txt
	$(PIP) $(PINNED) --requirement requirements/docs.txt
	touch $@

$(VENV)/wheel: $(VENV)/torch requirements/wheel.txt requirements/constraints.txt
	$(PIP) $(PINNED) --requirement requirements/wheel.txt
	touch $@

$(VENV)/tools: $(VENV)/torch requirements/dev.txt requirements/constraints.txt
	@echo "installing what tests and lint need: transformers, lightning, diffusers, ..."
	$(PIP) $(PINNED) --requirement requirements/dev.txt
	touch $@
