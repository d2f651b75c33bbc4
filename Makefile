# Every target sets itself up: the first one to run makes .venv and installs the project into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AUDIT := .venv-audit
STAMP := $(VENV)/.installed

# Some containers set it. Each of the hundreds of processes that the tests start would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test fast long lint check format protos docs site dashboards pictures bench dist image audit sbom clean

help:  ## List the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "DASE needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

train: $(STAMP)  ## Train two agents on a small MuJoCo task (one to two minutes after installing)
	$(BIN)/dase train

test: $(STAMP)  ## Run every test but the long ones
	$(BIN)/python -m pytest -n logical --dist worksteal

fast: $(STAMP)  ## Run the tests of the developer loop
	$(BIN)/python -m pytest -n logical --dist worksteal -m 'not slow'

long: $(STAMP)  ## Run the tests that take minutes each and that the others leave out
	DASE_LONG=1 $(BIN)/python -m pytest -n logical --dist worksteal -m long

lint: $(STAMP)  ## Check format, lint, types and import rules
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint fast  ## The developer loop: lint and fast tests

format: $(STAMP)  ## Format the code
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

protos: $(STAMP)  ## Generate the wire's code from protos/
	$(BIN)/python scripts/generate_protos.py

docs: $(STAMP)  ## Generate docs/cli.md, docs/configuration.md and docs/metrics.md
	$(BIN)/python scripts/write_cli.py > docs/cli.md
	$(BIN)/python scripts/write_configuration.py > docs/configuration.md
	$(BIN)/python scripts/write_metrics.py > docs/metrics.md

site: $(STAMP)  ## Build the documentation site in site/; a broken link or a page that is in no menu fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

dashboards: $(STAMP)  ## Generate deploy/grafana/dashboards
	$(BIN)/python scripts/write_dashboards.py

pictures: $(STAMP)  ## Make the pictures of dase top and of a report from a run of their own (needs Chromium)
	$(BIN)/python scripts/make_pictures.py

# Half an hour on a machine that does nothing else; each line can be run alone (docs/performance.md).
# AUTHORS and CLEANRL name copies of those projects' code; what is compared with one that is not given is skipped.
bench: $(STAMP)  ## Measure everything, and write docs/performance.md
	-scripts/get_reverb.sh
	$(BIN)/python benchmarks/against_reverb.py --results docs/results/against_reverb.csv
	$(BIN)/python benchmarks/large_pages.py --results docs/results/large_pages.csv
	$(BIN)/python benchmarks/growth.py --results docs/results/growth.csv
	$(BIN)/python benchmarks/run_time.py --results docs/results/run_time.csv $(if $(AUTHORS),--authors "$(AUTHORS)")
	$(BIN)/python benchmarks/startup.py --results docs/results/startup.csv $(if $(BEFORE),--against "$(BEFORE)")
	$(BIN)/python benchmarks/update_floor.py --results docs/results/update_floor.csv \
	  $(if $(AUTHORS),--authors "$(AUTHORS)") $(if $(CLEANRL),--cleanrl "$(CLEANRL)")
	$(BIN)/python benchmarks/subnormals.py --results docs/results/subnormals.csv
	$(BIN)/python benchmarks/stack.py --results docs/results/stack.csv
	$(BIN)/python benchmarks/serving.py --results docs/results/serving.csv
	$(BIN)/python benchmarks/scale.py --results docs/results/scale.csv
	$(BIN)/python benchmarks/scale.py --agents 256 --actors 4 --also docs/results/scale.csv --results docs/results/scale.csv
	$(BIN)/python benchmarks/scale.py --agents 256 --shards 4 --also docs/results/scale.csv --results docs/results/scale.csv
	-$(BIN)/python benchmarks/gpu.py --results docs/results/gpu.csv
	$(BIN)/python benchmarks/page.py

# Of a tree of its own, so that nothing gets in that only lies here; the same commit makes the same wheel.
dist: $(STAMP)  ## Make dist/, the wheel and the sdist of what is committed
	rm -rf build dist
	mkdir -p build/tree
	git archive HEAD | tar -x -C build/tree
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --quiet --no-isolation --outdir dist build/tree

# DOCKER=buildah and TARGET=replay work, too. The image is dase:VERSION, or dase:VERSION-replay.
DOCKER ?= docker
TARGET ?= full
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

image:  ## Build the container image, docs/kubernetes.md
	$(DOCKER) build --target $(TARGET) --build-arg VERSION=$(VERSION) \
	  --build-arg REVISION=$$(git rev-parse HEAD 2>/dev/null || echo unknown) \
	  $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) \
	  --tag dase:$(VERSION)$(if $(filter-out full,$(TARGET)),-$(TARGET)) .

# Apart from .venv, so that what is looked at is the project's and not the tools'.
$(AUDIT)/.installed: pyproject.toml
	test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(AUDIT)/bin/python -m pip install --quiet --group audit
	touch $(AUDIT)/.installed

audit: $(STAMP) $(AUDIT)/.installed  ## Look up known vulnerabilities of all that is installed
	$(AUDIT)/bin/python scripts/audit.py $(AUDIT)/bin/pip-audit $(BIN)/python

sbom: $(STAMP) $(AUDIT)/.installed  ## Write sbom.json, the list of all that is installed (CycloneDX)
	$(AUDIT)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o sbom.json $(BIN)/python

clean:  ## Remove what the targets made
	rm -rf $(VENV) $(AUDIT) build dist site sbom.json .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
