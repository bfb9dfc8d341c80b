# Needs Python 3.11 (or a later one that pyproject.toml allows) and make; everything else comes
# from the package registry that pip is set up for.
.POSIX:
.PHONY: install run test test-slow test-all test-versions lint types check docs bench deploy-demo dist clean

BIN = .venv/bin
STAMP = .venv/.installed

install: $(STAMP)

# `pip install -e`: a change of the sources needs no new installation, a change of what is
# depended on does.
$(STAMP): pyproject.toml constraints.txt
	@set -e; for python in "$$PYTHON" python3.11 python3 python; do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "Building .venv with $$python"; "$$python" -m venv .venv; break; \
		fi; \
	done
	@test -x $(BIN)/python || { echo "No Python 3.11 or later was found; set PYTHON" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --editable '.[dev,docs,deepwalk,metis,ogb,dp,optuna,notebooks]' --constraint constraints.txt
	@touch $@

# The main job: 2,708 users on the bundled Cora, 200 rounds, on Ray.
run: $(STAMP)
	@$(BIN)/flower-graph run quickstart --engine flwr

# At once: pytest takes longest, and the others use what it leaves of the cores.
test: $(STAMP)
	@$(MAKE) -j 3 lint types check

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# mypy does not follow `__path__`: it sees the package as it is once installed, by links.
types: $(STAMP)
	@rm -rf build/types && mkdir -p build/types/flower_graph
	@for part in flower_graph/* apps strategies; do \
		ln -s "$$PWD/$$part" build/types/flower_graph/; \
	done
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml \
		--cache-dir ../../.mypy_cache --package flower_graph

# Files in their order: those of deployments, which mostly wait, come early. Bytecode is written even
# where the environment forbids it: each of hundreds of processes would compile the library anew.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

check: $(STAMP)
	$(PYTEST) -m "not slow"

# Deployments, runs on Ray, benchmarks, the wheel, samples of what is frozen and of hostile replies,
# and what needs FLOWER_GRAPH_DATA: what CI runs besides `make test`.
test-slow: $(STAMP)
	$(PYTEST) -m "slow and not release" --durations=25

# All tests, before a release: thousands of parties, all that is frozen, every fault, lie and reply.
test-all: $(STAMP)
	$(PYTEST) --durations=25

# What touches Flower, with the oldest and the newest Flower, each in an environment of its own.
test-versions: $(STAMP)
	@test -x build/nox/bin/nox || { $(BIN)/python -m venv build/nox && \
		build/nox/bin/pip install --quiet 'nox>=2025.5'; }
	build/nox/bin/nox --noxfile .ci/noxfile.py

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

# The site, without a warning, where the package finds it: `flower-graph docs` opens it. Needs no
# network.
docs: $(STAMP)
	rm -rf flower_graph/site
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html \
		--doctree-dir build/doctrees docs flower_graph/site
	@du -sh flower_graph/site

# A SuperLink and four SuperNodes on this machine, which end with it.
deploy-demo: $(STAMP)
	@$(BIN)/python deploy/demo.py

# What goes to PyPI, into dist/: built, checked by twine, and tried where no checkout is. Beside it the
# versions of constraints.txt, with the hashes of their files on the package index.
dist: docs
	@rm -rf dist && mkdir dist
	@test -x build/uv/bin/uv || { $(BIN)/python -m venv build/uv && build/uv/bin/pip install --quiet uv; }
	build/uv/bin/uv pip compile --quiet pyproject.toml --all-extras --constraint constraints.txt \
		--python-version 3.11 --generate-hashes --no-header --no-annotate \
		--output-file dist/constraints-hashes.txt
	@! grep -q '^repository = ""' pyproject.toml || \
		echo "pyproject.toml names no repository: the README loses its links (docs/release.md)" >&2
	FLOWER_GRAPH_DIST="$$PWD/dist" $(BIN)/python -m pytest tests/test_wheel.py
	@ls -l dist

# Everything that can be made again; outputs of runs stay.
clean:
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist flower_graph/site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
