# Two commands for a fresh machine: `make demo` and `make test`. Each sets everything up by itself.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PYTHONUNBUFFERED := 1

# A test that hangs ends its worker and prints every thread, instead of the whole run.
ENDS := -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true

.PHONY: demo test test-all test-newest test-oldest lint types docs pictures install bench gpu-wheels gpu-day clean

demo: $(STAMP)  ## train a small GPT in 3D on eight processes, then on one, and compare
	@$(BIN)/python examples/demo.py

test: $(STAMP) lint types  ## lint, types and tests
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long and not gpu" $(ENDS)

# Cases that only this runs take hours: each day another eighth of them. PART=0/1 runs all.
PART ?= $(shell expr $$(date +%j) % 8)/8
test-all: $(STAMP) lint types  ## the same with what takes long
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu" --part $(PART) $(ENDS)

# The short set with the bounds of pyproject.toml, each in an environment of its own, with torch's CUDA (5 GB each).
test-newest: VERSIONS := torch lightning torchmetrics hydra-core
# hydra-core 1.3.0 also takes omegaconf 2.4, which warns of a function that it calls.
test-oldest: VERSIONS := torch==2.11.0 lightning==2.6.0 torchmetrics==1.4.0 hydra-core==1.3.0 omegaconf==2.3.0
test-newest test-oldest:  ## the short set with the newest, or the oldest, versions that pyproject.toml allows
	@test -x build/$@/bin/pip || $(PYTHON) -m venv build/$@
	build/$@/bin/python -m pip install -q --disable-pip-version-check --upgrade $(VERSIONS) -e ".[dev]"
	build/$@/bin/python -m pytest -n 2 --dist loadfile -m "not long and not gpu" $(ENDS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)  ## speed and memory against the peers that are installed: table, JSON and plot in build/bench
	@$(BIN)/python -m tests.bench

# A machine with a GPU has torch, Lightning and pytest, and often no network: these wheels are brought along.
gpu-wheels: $(STAMP)  ## wheels in build/wheels for a machine with a GPU
	$(BIN)/python -m pip wheel -q --no-deps -w build/wheels hydra-core==1.3.2 omegaconf==2.3.0 antlr4-python3-runtime==4.9.3

gpu-day:  ## what only a GPU shows, in order of worth: build/gpu/day.json and day.md
	@$(PYTHON) -m tests.gpu.day

pictures: $(STAMP)  ## the timetable of a run of four processes, as the picture of README and docs
	$(BIN)/python examples/timetable.py docs/timetable.png

# Not `-q`: it hides a dead link from `strict`, and the build ends well.
docs: $(STAMP)  ## the pages of docs/ as a site in build/site; a dead link is an error
	$(BIN)/python -m mkdocs build

install: $(STAMP)

# The CPU build of torch comes first: its version is pinned in constraints.txt, and a bare `torch` would bring CUDA.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
