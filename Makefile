# Every target makes the virtual environment first if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-for-demo
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: demo test nightly mutants nsys browser lint coverage docs accuracy examples benchmark fuzz clean

$(READY): pyproject.toml tests/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint tests/constraints.txt --editable '.[dev]'
	touch $(READY)

# Most modules of PyTorch are never imported, so bytecode is compiled only when a module is imported.
$(DEMO_READY): pyproject.toml
	@echo "Step 1 of 3: installing the package and PyTorch into $(VENV)."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile --constraint tests/constraints.txt --editable '.[run]'
	@touch $(DEMO_READY)

demo: $(DEMO_READY)  ## runs the small model on this machine, on a GPU or the CPU, and writes its report and its page
	@echo "Step 2 of 3: running the small model, once to time it and once to record it."
	@$(BIN)/nsys-analyze run --model small --output-dir demo --rerun
	@echo "Step 3 of 3: writing the page with the timeline."
	@$(BIN)/nsys-analyze report demo -o demo/report.html > /dev/null
	@echo "The page: demo/report.html"

test: lint  ## checks style and types, and runs the tests; also with a real nsys and a browser after `make nsys` and `make browser`
	NSYS="$${NSYS:-$(wildcard $(CURDIR)/.nsys/usr/bin/nsys)}" $(BIN)/python -m pytest $(SIDE_BY_SIDE)

nightly: lint  ## runs every test with ten times as many examples, then `make mutants` and `make fuzz`
	NSYS="$${NSYS:-$(wildcard $(CURDIR)/.nsys/usr/bin/nsys)}" $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "" --hypothesis-profile=nightly
	$(MAKE) mutants fuzz

nsys:  ## unpacks Debian's nsys into .nsys; needs no root
	tests/fetch_nsys.sh

browser:  ## installs Debian's Chromium if there is none; needs root
	tests/fetch_chromium.sh

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

coverage: $(READY)  ## shows which lines and branches the tests reach, also in the processes that they start
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --cov --cov-report term

docs: $(READY)  ## installs mkdocs-material and makes a site of the pages in build/site, which needs no network
	$(BIN)/python -m pip install --quiet --constraint tests/constraints.txt mkdocs-material 'mkdocs<2'
	rm -rf build/docs
	mkdir -p build/docs
	git ls-files -- '*.md' LICENSE docs examples profiling_targets ':!*.sqlite' ':!*.xz' | tar -cf - -T - | tar -xf - -C build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

accuracy: $(READY)  ## writes docs/accuracy.md from the committed captures and timings of planted faults
	$(BIN)/python examples/accuracy.py

examples: $(READY)  ## renews the committed reports, figures, pictures and the outputs on the pages, from the committed captures
	$(BIN)/python docs/make_reference.py
	$(BIN)/python -m tests.renew_examples
	mkdir -p examples/pages
	PAGE_PICTURES=$(CURDIR)/examples/pages $(BIN)/python -m pytest tests/test_page_in_browser.py -k opens_whole

benchmark: $(READY)  ## measures speed and memory, as ratios within one run
	$(BIN)/python -m tests.benchmarks.bench_report
	$(BIN)/python -m tests.benchmarks.bench_page
	$(BIN)/python -m tests.benchmarks.bench_kineto
	$(BIN)/python -m tests.benchmarks.bench_timings
	$(BIN)/python -m tests.benchmarks.bench_many
	$(BIN)/python -m tests.benchmarks.bench_ranks
	$(BIN)/python -m tests.benchmarks.bench_target

mutants: $(READY)  ## makes single changes to the analysis, and prints the share of them that its tests notice
	$(BIN)/python -m tests.mutants

FUZZ_SECONDS ?= 600
fuzz: $(READY)  ## tries broken, hostile and odd inputs and kills sweeps for FUZZ_SECONDS, and prints the seeds
	$(BIN)/python -m pip install --quiet atheris || echo "atheris does not install here: no coverage-guided runs"
	$(BIN)/python -m tests.fuzz --seconds $$(( $(FUZZ_SECONDS) * 5 / 8 ))
	$(BIN)/python -m tests.fuzz.durability --seconds $$(( $(FUZZ_SECONDS) / 8 ))
	for target in loader converter; do ! $(BIN)/python -c "import atheris" 2> /dev/null \
	  || $(BIN)/python -m tests.fuzz.guided $$target --seconds $$(( $(FUZZ_SECONDS) / 8 )) || exit 1; done

clean:
	rm -rf $(VENV) .nsys demo runs bench
