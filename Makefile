# Everything runs from a virtual environment of its own; make sets it up when it is missing.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# What the demo needs is installed by itself: tests and development take three times as much.
RUNNABLE := $(VENV)/.runnable
STAMP := $(VENV)/.installed
CLIENTS := $(VENV)/clients
AWSCLI := $(CLIENTS)/awscli/.installed
NPM := $(CLIENTS)/node/.installed
GO_TESTS := $(CLIENTS)/go/awssnssqs.test
JAVA_TESTS := $(CLIENTS)/java/Sqs.class
FUZZ_SECONDS ?= 60
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
# Much of the tests' time is waiting for disks, servers and clocks.
WORKERS ?= $(shell expr 2 \* $$(nproc))
# Tests start hundreds of Python processes: without bytecode each would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-embedded test test-spark test-others check pythons fresh lint types format soak fuzz clients \
  needs-demo needs-test docs wheel clean bench bench-embedded bench-depth bench-disk bench-mixed bench-fairness bench-routing bench-pipeline \
  bench-server bench-server_sqs bench-engines bench-worker bench-cluster bench-retention

demo: needs-demo $(RUNNABLE) ## publish, Spark pipeline, workers, report; KEEP=1 leaves the console open
	$(BIN)/python examples/pipeline_demo.py $(if $(KEEP),--keep)

demo-embedded: $(RUNNABLE) ## the same without Spark: the broker inside one process
	$(BIN)/python examples/demo.py

# The tests of Spark come last: they would take the two cores from tests that wait for each other.
test: needs-test $(STAMP) ## the whole test suite, with lint and types
	$(MAKE) --jobs=4 --output-sync=target --no-print-directory lint types clients
	$(MAKE) --no-print-directory test-others
	$(MAKE) --no-print-directory test-spark

test-others: $(STAMP) clients ## the tests without Spark
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not spark and not soak"

test-spark: $(STAMP) ## the tests with Spark, in two sessions
	$(BIN)/python -m pytest tests/spark -n 2 --dist loadfile -m "spark and not soak"

check: $(STAMP)         ## lint, types and the quick tests: under two minutes
	$(MAKE) --jobs=2 lint types
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow and not spark and not soak"

pythons:                ## lint, types and the quick tests on every Python of PYTHONS
	@missing=; for each in $(PYTHONS); do \
	  $$each -c "" 2>/dev/null || { missing="$$missing $$each"; continue; }; \
	  $(MAKE) --no-print-directory check PYTHON=$$each VENV=.venv-$$each || exit 1; \
	done; \
	[ -z "$$missing" ] || { echo "not tried, as not installed:$$missing (from your system's packages," \
	  "or: uv python install, pyenv install; then on PATH)"; exit 1; }

fresh:                  ## README's two commands on bare Debians, as root and as a user; needs root
	tools/fresh.sh build/fresh

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Not --quiet: that hides warnings, and so makes --strict mute.
docs: $(STAMP)          ## tables of the docs from the code; the documentation site, into build/site
	$(BIN)/python -m tests.docs.tables
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: docs             ## the wheel and the source distribution, into dist; the wheel has the site
	$(BIN)/python -m hatchling build

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: needs-test $(STAMP) ## every suite on every engine and design, many more examples, long tests
	PYTEST_DEBUG_TEMPROOT=$${TMPDIR:-/tmp} PENSTOCK_HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest tests/simulation tests/crash \
	  tests/conformance tests/routing tests/native/test_conformance.py tests/flight \
	  tests/filters tests/kv -m "not spark" -q
	PYTEST_DEBUG_TEMPROOT=$${TMPDIR:-/tmp} $(BIN)/python -m pytest -m soak -q

fuzz: $(STAMP)          ## every parser under a coverage-guided fuzzer, FUZZ_SECONDS each
	@$(BIN)/python -c "import atheris" 2>/dev/null || $(BIN)/python -m pip install --quiet atheris
	@for each in http_wire sqs_json sqs_query native_frames filter_text signature; do \
	  echo "fuzzing $$each for $(FUZZ_SECONDS) s"; \
	  $(BIN)/python tests/fuzz/run.py $$each $(FUZZ_SECONDS) || exit 1; \
	done

bench: bench-embedded bench-depth bench-disk bench-mixed bench-fairness bench-routing bench-pipeline bench-server \
  bench-server_sqs bench-engines bench-worker bench-cluster bench-retention

bench-embedded bench-depth bench-disk bench-mixed bench-fairness bench-routing bench-pipeline bench-server \
bench-server_sqs bench-engines bench-worker bench-cluster bench-retention: bench-%: $(STAMP)
	$(BIN)/python benchmarks/$*.py

needs-demo needs-test: needs-%:
	@PYTHON=$(PYTHON) tools/needs.sh $*

# Nothing is compiled here: most modules of pandas, moto and the like are never imported, and those
# that are compile then.
$(RUNNABLE): pyproject.toml
	@PYTHON=$(PYTHON) tools/needs.sh env
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[server,spark]'
	@touch $@

$(STAMP): $(RUNNABLE)
	$(BIN)/python -m pip install --quiet --no-compile --editable . --group dev
	@touch $@

clients: $(AWSCLI) $(NPM) $(GO_TESTS) $(JAVA_TESTS) ## SQS's clients of other makers, which tests drive the server with

# In an environment of its own: it pins another botocore than boto3 does.
$(AWSCLI): | $(STAMP)
	$(PYTHON) -m venv $(CLIENTS)/awscli
	$(CLIENTS)/awscli/bin/python -m pip install --quiet --no-compile "awscli>=1.40"
	@touch $@

$(NPM): tests/clients/node/package.json tests/clients/node/package-lock.json | $(STAMP)
	@mkdir -p $(@D) && cp $^ $(@D)
	@! command -v npm >/dev/null || \
	  { cd $(@D) && npm ci --no-audit --no-fund --loglevel=error && touch $(@F); }

# Go Cloud tests a driver inside of the driver's package: ours is compiled there, with its helpers.
$(GO_TESTS): $(addprefix tests/clients/go/,go.mod go.sum conformance_test.go) | $(STAMP)
	@mkdir -p $(@D) && cp $^ $(@D)
	@! command -v go >/dev/null || { cd $(@D) && go mod download gocloud.dev && rm -rf gocloud \
	  && cp -r "$$(go list -m -f '{{.Dir}}' gocloud.dev)" gocloud && chmod -R u+w gocloud \
	  && cp conformance_test.go gocloud/pubsub/awssnssqs/penstock_test.go \
	  && cd gocloud && go test -c -o ../$(@F) ./pubsub/awssnssqs; } \
	  || echo "Go Cloud's tests can't be built: they are skipped."

$(JAVA_TESTS): $(addprefix tests/clients/java/,pom.xml jars.sha256 Sqs.java) | $(STAMP)
	@mkdir -p $(@D) && cp $^ $(@D)
	@! { command -v mvn && command -v javac; } >/dev/null || { cd $(@D) && rm -rf jars \
	  && mvn -q -B -C dependency:copy-dependencies -DoutputDirectory=jars \
	  && (cd jars && sha256sum --quiet --check ../jars.sha256) \
	  && javac -Xlint:none -cp 'jars/*' -d . Sqs.java; } \
	  || echo "The tests of the AWS SDK for Java can't be built: they are skipped."

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
