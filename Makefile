# Each target makes its own virtual environment: nothing needs to be there but Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test long zoo kit check docs pictures notebooks wheel benchmarks clean

.venv/.demo: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[demo]'
	touch $@

.venv/.test: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[test]'
	touch $@

.venv/.docs: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[docs]'
	touch $@

demo: .venv/.demo
	$(BIN)/python -m fxpipe demo

test: .venv/.test
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

# what "test" has no time for: the rest of the lists and products of parameters of which it runs a part (so
# many as have all values, or one in so many); most comparisons of plans with all other possibilities; most
# notebooks; and what needs many processes, or long waits, and is tested in a smaller way, too
long: .venv/.test
	$(BIN)/python -m pytest --numprocesses auto -m long

# every model of tests/models; writes the tables of results
zoo: .venv/.test
	$(BIN)/python -m tests.models.table

# what a machine with a GPU is asked, on the simulated accelerator: python -m tests.gpu FOLDER
kit: .venv/.test
	$(BIN)/python -m tests.gpu --dry-run kit-out

check: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the API reference, as docs-out/index.html; a warning is an error, and so is a name that leads nowhere
docs: .venv/.docs
	$(BIN)/python -m sphinx -q -E -W -n --keep-going docs docs-out

# that of README.md
pictures: .venv/.demo
	$(BIN)/python -m fxpipe compile fxpipe.demo:UNet --devices cpu,cpu,cpu,cpu --chunks 4 \
		--input 16,3,64,64 --draw docs/pictures/unet.svg

# runs the notebooks, and keeps what they show
notebooks: .venv/.test
	$(BIN)/python -m tests.notebooks

# the source distribution and the wheel made from it, each installed in empty environments
wheel: .venv/.test
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m tests.distribution dist

# torchgpipe asks for an old torch, and works with a new one
benchmarks: .venv/.test
	$(PIP) --no-deps torchgpipe==0.0.7
	$(BIN)/python -m tests.benchmarks.lanes
	$(BIN)/python -m tests.benchmarks.step
	$(BIN)/python -m tests.benchmarks.bubbles
	$(BIN)/python -m tests.benchmarks.recomputation
	$(BIN)/python -m tests.benchmarks.overhead
	$(BIN)/python -m tests.benchmarks.host
	$(BIN)/python -m tests.benchmarks.cut
	$(BIN)/python -m tests.benchmarks.cut_predicted
	$(BIN)/python -m tests.benchmarks.cut_heuristics
	$(BIN)/python -m tests.benchmarks.measured_cost
	$(BIN)/python -m tests.benchmarks.memory
	$(BIN)/python -m tests.benchmarks.compile_time_cut
	$(BIN)/python -m tests.benchmarks.compile_time
	$(BIN)/python -m tests.benchmarks.draw

clean:
	rm -rf .venv dist build *.egg-info demo-out docs-out kit-out
