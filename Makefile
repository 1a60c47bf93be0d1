# Every target installs what it needs first, from the locked requirements.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
UNIT   := tests
TOGETHER ?= 3
SECONDS ?= 3600
# Of what is drawn at random: make fuzz-properties SEED=7 draws the same again.
SEED ?= $(shell date +%s)
SEED := $(SEED)
# What starts processes or runs the whole product, and so takes as long as all that `test-fast` has.
FAST_LEAVES_OUT := tests/property/test_control_document.py tests/tidy/test_public_contract.py \
  tests/tidy/test_same_examples.py tests/unit/test_state_units.py tests/unit/test_supervisor.py
COMPILED := build/compiled
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE  ?= price-keeper
# The version that is kept as tests/fixtures/v0_1, unless told otherwise.
OLD    ?= a4167df2
OLDER  := build/older/$(OLD)
# The last version that spoke HTTP/2 by the library h2; where it is installed, the benchmark measures it too.
WITH_H2 := build/older/4f7b388b
NODE   := tests/flow/clients/programs
LOCK   := $(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --upgrade

# Whoever has it set would have every process of ours read its sources anew; the tests start hundreds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup run test test-fast compiled test-compiled compiler clients test-clients test-prices test-deploy image-root test-page screenshots fuzz fuzz-properties soak together check audit contract fixtures bench bench-older bench-more bench-hour bench-check bench-parts cli-docs cli-pictures newcomer format lock clean help dist test-dist image push-image chart push-chart release-check release-notes lint-workflows

help:                ## what can be made
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/ ##/' | column -t -s '#'

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: requirements/run.lock pyproject.toml | $(VENV)/.python
	$(PIP) install --require-hashes -r requirements/run.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.run
	$(PIP) install --no-compile --require-hashes -r requirements/dev.lock
	@touch $@

setup: $(VENV)/.dev  ## the virtual environment with everything locked

run: $(VENV)/.run    ## the development mode: embedded store, simulated Bedrock, no AWS account
	@$(BIN)/price-keeper dev

test: $(VENV)/.dev   ## every test a newcomer needs
	$(BIN)/python -m pytest -n $(TOGETHER) --dist loadfile --no-loadscope-reorder $(UNIT)

# Neither servers nor processes; a tenth of the examples of `test`.
test-fast: $(VENV)/.dev ## in a minute what tells most: unit, property and tidy tests, without servers and with few examples
	PRICE_KEEPER_EFFORT=0.1 $(BIN)/python -m pytest -n $(TOGETHER) --dist loadfile --no-loadscope-reorder \
	  -k "not moto and not ministack" $(FAST_LEAVES_OUT:%=--ignore=%) tests/tidy tests/property tests/unit

compiler:
	@command -v $(CC) > /dev/null || { echo "No C compiler here, which only \`compiled\` and \`test-compiled\` need:"; \
	  echo "Debian and Ubuntu: apt-get install gcc python3-dev; Fedora: dnf install gcc python3-devel; macOS: xcode-select --install."; \
	  echo "Without one, everything works as pure Python: make setup"; exit 2; }

# The wheel and the tests are of a copy, so that nothing compiled comes to lie beside the sources.
$(COMPILED)/.copied: compiler
	rm -rf $(COMPILED)
	mkdir -p $(COMPILED)
	cp -R $(filter-out build data dist,$(wildcard *)) $(COMPILED)
	@touch $@

compiled: $(VENV)/.dev $(COMPILED)/.copied ## the wheel as it is shipped, its hot path compiled, and .venv/compiled with it; needs a C compiler
	cd $(COMPILED) && PRICE_KEEPER_COMPILED=1 $(abspath $(BIN))/python -m pip --disable-pip-version-check -q wheel \
	  --no-deps --no-build-isolation -w dist .
	$(BIN)/python -m venv $(VENV)/compiled
	$(VENV)/compiled/bin/python -m pip --disable-pip-version-check -q install --require-hashes -r requirements/run.lock
	$(VENV)/compiled/bin/python -m pip --disable-pip-version-check -q install --no-deps --force-reinstall $(COMPILED)/dist/*.whl
	@$(VENV)/compiled/bin/price-keeper --version
	@ls $(COMPILED)/dist/*.whl

test-compiled: $(VENV)/.dev $(COMPILED)/.copied ## the tests, but for those of the sources themselves, with the hot path compiled
	cd $(COMPILED) && PRICE_KEEPER_COMPILED=1 $(abspath $(BIN))/python setup.py -q build_ext --inplace
	cd $(COMPILED) && PRICE_KEEPER_COMPILED=1 $(abspath $(BIN))/python -m pytest -n $(TOGETHER) --dist loadfile \
	  --no-loadscope-reorder tests/contract tests/faults tests/flow tests/property tests/sim tests/unit

# Both wheels are built from the sdist, so what it lacks is found out.
dist: $(VENV)/.dev compiler ## sdist, wheel of pure Python and compiled wheel, in dist; needs a C compiler
	rm -rf dist
	PRICE_KEEPER_COMPILED=0 $(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' > /dev/null
	for compiled in 0 1; do PRICE_KEEPER_COMPILED=$$compiled $(PIP) wheel --no-deps --no-build-isolation -w dist dist/*.tar.gz; done
	@ls dist/*

test-dist: dist $(VENV)/.deploy ## installs what `dist` made into fresh environments, by pip and by pipx, and runs it; downloads its packages
	PRICE_KEEPER_TEST_DIST=$${PRICE_KEEPER_TEST_DIST:-1} $(BIN)/python -m pytest tests/artefacts

image:               ## the image, as IMAGE:version; needs Docker
	docker build --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) -t $(IMAGE):$(VERSION) .

push-image:          ## sends it to the registry that IMAGE names
	docker push $(IMAGE):$(VERSION)

chart: $(VENV)/.deploy ## the Helm chart as an archive, in dist
	mkdir -p dist
	$(VENV)/deploy/bin/helm package deploy/helm/price-keeper --destination dist

push-chart: chart    ## sends it to the registry CHARTS=oci://host/path
	$(VENV)/deploy/bin/helm push dist/price-keeper-$(VERSION).tgz $(CHARTS)

release-check: $(VENV)/.python ## whether TAG=v1.2.3 is the version of everything here, and the changelog has it
	@$(BIN)/python -m tools.release check "$(TAG)"

release-notes: $(VENV)/.python ## this version's part of the changelog
	@$(BIN)/python -m tools.release notes

lint-workflows: $(VENV)/.deploy ## what GitHub would refuse in .github/workflows
	$(VENV)/deploy/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yaml

$(VENV)/.clients: requirements/clients.lock | $(VENV)/.python
	$(PYTHON) -m venv $(VENV)/clients
	$(VENV)/clients/bin/python -m pip --disable-pip-version-check -q install --require-hashes -r requirements/clients.lock
	@touch $@

# Without npm this file does not come to be, and the next run looks for npm again.
$(NODE)/node_modules/.package-lock.json: $(NODE)/package-lock.json
	@command -v npm > /dev/null || echo "no npm here: the JavaScript clients are left out"
	@! command -v npm > /dev/null || { cd $(NODE) && npm ci --loglevel=error; }

clients: $(VENV)/.clients $(NODE)/node_modules/.package-lock.json ## the newest SDKs, in environments of their own

test-clients: clients $(VENV)/.dev ## real SDKs against the sidecar; takes minutes
	PRICE_KEEPER_TEST_CLIENTS=$${PRICE_KEEPER_TEST_CLIENTS:-1} $(BIN)/python -m pytest tests/flow/clients

test-prices: $(VENV)/.clients $(VENV)/.dev ## the prices that tests calculate with, beside LiteLLM's
	PRICE_KEEPER_TEST_PRICES=$${PRICE_KEEPER_TEST_PRICES:-1} $(BIN)/python -m pytest tests/prices

# Playwright is 53 MB, so only those who look at pages install it. It drives the Chromium that is here and downloads none.
$(VENV)/.page: requirements/page.lock $(VENV)/.dev
	$(PIP) install --no-compile --require-hashes -r requirements/page.lock
	@touch $@

test-page: $(VENV)/.page ## the status page in a real Chromium; takes a minute or two
	PRICE_KEEPER_TEST_PAGE=$${PRICE_KEEPER_TEST_PAGE:-1} $(BIN)/python -m pytest tests/page

screenshots: $(VENV)/.page ## take the pictures in docs/images anew; needs Chromium, takes two minutes
	$(BIN)/python -m tests.support.screenshots

# Helm, linters and schemas, in an environment of their own.
$(VENV)/.deploy: requirements/deploy.lock | $(VENV)/.python
	$(PYTHON) -m venv $(VENV)/deploy
	$(VENV)/deploy/bin/python -m pip --disable-pip-version-check -q install --require-hashes -r requirements/deploy.lock
	@touch $@

test-deploy: $(VENV)/.dev $(VENV)/.deploy ## what is deployed: manifests, chart, policies, the image's root; needs root and debootstrap
	PRICE_KEEPER_TEST_DEPLOY=$${PRICE_KEEPER_TEST_DEPLOY:-1} $(BIN)/python -m pytest tests/deploy

image-root: $(VENV)/.dev ## carries out the Dockerfile without Docker, in build/image/root; needs root and debootstrap
	$(BIN)/python -m tests.support.image

# What is installed for a run, and atheris, which must not be beside what is shipped; where there is no wheel, `fuzz` says so.
$(VENV)/.fuzz: requirements/fuzz.lock | $(VENV)/.python
	$(PYTHON) -m venv $(VENV)/fuzz
	$(VENV)/fuzz/bin/python -m pip --disable-pip-version-check -q install --require-hashes -r requirements/fuzz.lock
	@touch $@

fuzz: $(VENV)/.fuzz  ## ten minutes of coverage-guided fuzzing of all that strangers send; what it finds stays in tests/fuzz/found
	PYTHONPATH=proxy $(VENV)/fuzz/bin/python -m tests.fuzz.run --seconds $${PRICE_KEEPER_FUZZ_SECONDS:-600}

fuzz-properties: $(VENV)/.dev ## property tests and simulations with 20 times as many examples, drawn at random; takes most of an hour
	PRICE_KEEPER_EFFORT=20 PRICE_KEEPER_SEED=$(SEED) $(BIN)/python -m pytest --hypothesis-seed=$(SEED) tests/property tests/sim
	PRICE_KEEPER_EFFORT=20 PRICE_KEEPER_SEED=$(SEED) $(BIN)/python -m pytest --hypothesis-seed=$(SEED) -m hypothesis tests/unit
	$(BIN)/python -m tests.sim.run --from $(SEED) --seconds 300

soak: $(VENV)/.dev   ## an hour of load and faults (SECONDS=60: a look), a hundred kills on each engine, a minute without a store
	$(BIN)/python -m tests.soak --seconds $(SECONDS)
	PRICE_KEEPER_KILLS=100 PRICE_KEEPER_AWAY_SECONDS=60 $(BIN)/python -m pytest -s \
	  tests/faults/test_recording_kill.py tests/faults/test_hard_budget_kill.py tests/faults/test_store_outage.py
	PRICE_KEEPER_WIRE_SECONDS=300 $(BIN)/python -m pytest -s tests/faults/test_wire_random.py
	PRICE_KEEPER_KILLS=30 PRICE_KEEPER_STOPPED_SECONDS=60 PRICE_KEEPER_AFFLICTED_SECONDS=20 \
	  PRICE_KEEPER_MEMORY_SECONDS=300 $(BIN)/python -m pytest -s tests/faults/test_process_*.py

$(OLDER)/.venv/.run:
	mkdir -p $(OLDER)
	git archive $(OLD) | tar -x -C $(OLDER)
	$(MAKE) -C $(OLDER) .venv/.run

together: $(VENV)/.dev $(OLDER)/.venv/.run ## an older version (OLD=commit) and this one on one store, killed and swapped; takes ten minutes
	$(BIN)/python -m tests.together --old $(OLDER)

check: $(VENV)/.dev  ## lint, format, types, template
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/cfn-lint deploy/cloudformation/*.yaml

# What the comparison alone needs, in an environment of its own; without npm it goes on without Portkey.
$(VENV)/.bench: requirements/bench.lock requirements/bench-gateways/package-lock.json | $(VENV)/.python
	$(PYTHON) -m venv $(VENV)/bench
	$(VENV)/bench/bin/python -m pip --disable-pip-version-check -q install --require-hashes -r requirements/bench.lock
	mkdir -p $(VENV)/bench/gateways
	cp requirements/bench-gateways/*.json $(VENV)/bench/gateways
	cd $(VENV)/bench/gateways && npm ci --ignore-scripts --loglevel=error || echo "Portkey is not installed: it needs node and npm"
	@touch $@

bench: $(VENV)/.dev $(VENV)/.bench ## beside nginx, Envoy, Portkey, LiteLLM and others: writes docs/performance.md; needs nginx and wrk; takes 25 minutes
	@$(MAKE) compiled || echo "so only the build without compiled modules is measured"
	$(BIN)/python -m bench.speed $(if $(wildcard $(WITH_H2)/.venv/.run),--older $(WITH_H2))

bench-older:         ## the last version with h2, in both builds, which bench then measures beside this one
	$(MAKE) $(WITH_H2)/.venv/.run OLD=$(notdir $(WITH_H2))
	$(MAKE) -C $(WITH_H2) compiled

bench-more: $(VENV)/.dev ## the control API, and many apps and streams; adds to docs/performance.md; takes 20 minutes
	$(BIN)/python -m bench.speed.control
	$(BIN)/python -m bench.speed.scaling
	$(BIN)/python -m bench.speed.report

bench-hour: $(VENV)/.dev ## whether memory and descriptors stay as they are through an hour of load; adds to docs/performance.md
	$(BIN)/python -m bench.speed.hour
	$(BIN)/python -m bench.speed.report

bench-parts: $(VENV)/.dev ## measure parts alone: the store, signing, metering, how far budgets are passed
	$(BIN)/python -m bench.sqlite_counters
	$(BIN)/python -m bench.signing_and_frames
	$(BIN)/python -m bench.metering
	$(BIN)/python -m bench.write_units
	$(BIN)/python -m bench.state_units --count
	$(BIN)/python -m bench.many_counters
	$(BIN)/python -m bench.store_requests --counters 220 --pause 30
	$(BIN)/python -m bench.store_requests --flip
	$(BIN)/python -m bench.overspend
	$(BIN)/python -m bench.overspend --processes 8

bench-check: $(VENV)/.dev ## whether the hot path takes more instructions than what is kept; needs valgrind
	$(BIN)/python -m bench.check

audit: $(VENV)/.run  ## what is known to be wrong with what is pinned, and its licences; asks the package indexes
	$(BIN)/python -m tools.audit

cli-docs: $(VENV)/.run ## write the reference of docs/cli.md from the parser
	$(BIN)/python -m tools.cli_docs

contract: $(VENV)/.dev ## write docs/public-contract.yaml, of all names that users rely on, from the running product
	$(BIN)/python -m tests.public_contract

fixtures: $(VENV)/.dev ## what this version leaves behind, for later ones to read: make fixtures NAME=v0_2
	$(BIN)/python -m tests.fixtures.make $(NAME)

cli-pictures: $(VENV)/.run ## take the pictures of docs/cli.md, each of a real run
	$(BIN)/python -m tools.cli_pictures

newcomer: $(VENV)/.dev ## how long docs/five-minutes.md takes from a fresh clone to the first metered answer; downloads everything
	$(BIN)/python -m bench.newcomer

format: $(VENV)/.dev ## put the sources in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(VENV)/.python ## resolve the dependencies anew, for every Python and platform
	$(PIP) install uv
	$(LOCK) requirements/run.in -o requirements/run.lock
	$(LOCK) -c requirements/run.lock requirements/dev.in -o requirements/dev.lock
	$(LOCK) -c requirements/dev.lock requirements/page.in -o requirements/page.lock
	$(LOCK) -c requirements/dev.lock requirements/build.in -o requirements/build.lock
	$(LOCK) requirements/clients.in -o requirements/clients.lock
	$(LOCK) requirements/bench.in -o requirements/bench.lock
	$(LOCK) requirements/deploy.in -o requirements/deploy.lock
	$(LOCK) -c requirements/run.lock requirements/fuzz.in -o requirements/fuzz.lock
	cd $(NODE) && npm install --package-lock-only --save-exact $$(node -p \
	  'Object.keys(require("./package.json").dependencies).map((name) => name + "@latest").join(" ")')
	cd $(NODE) && npm update --package-lock-only
	cd requirements/bench-gateways && npm install --package-lock-only --save-exact @portkey-ai/gateway@latest

clean:               ## remove what was installed and built
	rm -rf $(VENV) $(NODE)/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
