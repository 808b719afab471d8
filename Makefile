# Everything works in a fresh clone: a target makes what it needs, in .venv, and a second run finds it there.
# PYTHON chooses the interpreter of .venv; ARGS is handed to the program that a target runs.

PYTHON ?= python3.13 python3.12 python3.11 python3.14 python3
ARGS ?=
WORKERS ?= 6
MINUTES ?= 30
SEED ?=

# every test starts Python again and again, which is slower where it may not keep what it has compiled
export PYTHONDONTWRITEBYTECODE =

VENV = .venv
LOWEST = .venv-lowest
DIST_ENV = .venv-dist
IMAGE_EXTRAS = s3,azure,fast,avro,protobuf,query,table
LOWEST_TESTS = tests/unit --ignore=tests/unit/test_comparison_results.py --ignore=tests/unit/test_house.py \
  --ignore=tests/unit/properties/test_simulation.py tests/acceptance/test_run.py \
  tests/integration/capture/test_keys.py tests/integration/capture/test_user_code.py tests/integration/capture/test_capture.py
RUN = $(VENV)/bin/python -m
INSTALL = $(RUN) pip install --quiet --disable-pip-version-check --editable
FOR_DEMO = $(VENV)/installed-demo
FOR_DEV = $(VENV)/installed-dev
SITE_ENV = .venv-site
FOR_SITE = $(SITE_ENV)/installed
USABLE = import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL = help
.PHONY: help demo test test-exhaustive nightly test-lowest lint bench chaos simulate clean dist docs site screenshots java

help:
	@echo 'make demo    orders from a NATS server of its own to Parquet, Spark SQL and back; ARGS="--messages 5000"'
	@echo 'make test    what a change must pass, WORKERS=6 tests at a time; ARGS="-k name"'
	@echo 'make test-exhaustive   what make test leaves out: every combination, older servers, many more examples'
	@echo 'make nightly   everything: all tests with the programs they need, older servers, the lowest versions, site and dist'
	@echo 'make test-lowest   some of the tests with the lowest version of every dependency'
	@echo 'make lint    ruff, mypy and import-linter'
	@echo 'make bench   the whole daemon beside others; ARGS="--sizes 1000 --runners limit jetcapture-json"'
	@echo 'make chaos   break everything for a while, then check every message; MINUTES=30 SEED=1 ARGS="--cluster"'
	@echo 'make simulate   commands beside each other on a simulated store, stopped at every step; SCHEDULES=100000 SEED=1'
	@echo 'make docs    write the tables of docs/configuration.md, compatibility.md and kubernetes.md, and the dashboard'
	@echo 'make site    the documents as a site, in build/site; fails for a broken link; ARGS=serve shows it'
	@echo 'make screenshots   take the pictures of docs/images, in 17 minutes, with Chromium; ARGS="--minutes 5"'
	@echo 'make dist    what a release consists of, in dist: sdist, wheel, chart (with helm), SBOM, checksums'
	@echo 'make clean   remove .venv, caches and builds; archives of the demonstration stay'

demo: $(FOR_DEMO) java
	@$(RUN) jetcapture_py demo --spark $(ARGS)

# more workers than cores, because tests often wait
test: $(FOR_DEV) java
	$(RUN) tests.support.java
	$(RUN) pytest -n $(WORKERS) -m 'not exhaustive' $(ARGS)

test-exhaustive: $(FOR_DEV) java
	$(RUN) tests.support.java
	$(RUN) pytest -n $(WORKERS) -m 'exhaustive or hypothesis' --hypothesis-profile=thorough $(ARGS)

nightly:
	.ci/nightly

# newer libraries warn of older ones, which is no fault here
test-lowest: $(FOR_DEV)
	$(RUN) venv --clear $(LOWEST)
	$(VENV)/bin/python .ci/lowest.py | tee $(LOWEST)/pins.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -r $(LOWEST)/pins.txt \
	  pytest pytest-timeout hypothesis psutil avro grpcio-tools msgpack polars
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(LOWEST)/bin/python -m pytest -q -p no:cacheprovider \
	  -o filterwarnings=default -m 'not exhaustive' $(LOWEST_TESTS)

lint: $(FOR_DEV)
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy
	$(VENV)/bin/lint-imports --no-logo
	$(RUN) mypy examples/arrow_writer.py examples/custom_decoder.py examples/hooks.py examples/notebook.py examples/pipeline.py examples/readings.py

bench: $(FOR_DEV)
	$(RUN) benchmarks.compare $(ARGS)

chaos: $(FOR_DEV) java
	@$(RUN) tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

simulate: $(FOR_DEV)
	@PYTHONHASHSEED=0 $(RUN) tests.simulation $(if $(SCHEDULES),--schedules $(SCHEDULES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

docs: $(FOR_DEV)
	@$(VENV)/bin/python docs/generate.py

# an environment of its own: it needs nothing of the product, whose sources it only reads
site: $(FOR_SITE)
	@NO_MKDOCS_2_WARNING=1 $(SITE_ENV)/bin/python -m mkdocs $(or $(ARGS),build --quiet) --strict
	@echo 'build/site/index.html'

screenshots: $(FOR_DEV) java
	@$(VENV)/bin/python docs/screenshots.py $(ARGS)

# the SBOM is that of the wheel with the extras of the image
dist: $(FOR_DEV)
	rm -rf dist $(DIST_ENV)
	$(RUN) build --outdir dist .
	$(RUN) venv --without-pip $(DIST_ENV)
	$(RUN) pip --python $(DIST_ENV) install --quiet --disable-pip-version-check "$$(ls dist/*.whl)[$(IMAGE_EXTRAS)]"
	$(RUN) cyclonedx_py environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
	  --output-file "$$(ls dist/*.tar.gz | sed 's/\.tar\.gz$$/.cdx.json/')" $(DIST_ENV)/bin/python
	if command -v helm >/dev/null; then helm package --destination dist examples/kubernetes/chart; fi
	cd dist && sha256sum * >../$(DIST_ENV)/SHA256SUMS && mv ../$(DIST_ENV)/SHA256SUMS .
	rm -rf $(DIST_ENV)

clean:
	rm -rf $(VENV) $(LOWEST) $(DIST_ENV) $(SITE_ENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist spark-warehouse metastore_db derby.log
	find jetcapture_py spark_jobs tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(FOR_DEMO): pyproject.toml
	@set -e; \
	usable() { for python in $(PYTHON); do if "$$python" -c '$(USABLE)' 2>/dev/null; then return; fi; done; return 1; }; \
	if ! '$(VENV)/bin/python' -c '$(USABLE)' 2>/dev/null; then \
	  usable || { echo 'make: Python 3.11 or newer is needed, with its venv module (python3-venv on Debian);' \
	    'PYTHON=/path/to/python3 chooses one' >&2; exit 1; }; \
	  "$$python" -m venv --clear '$(VENV)'; \
	fi; \
	echo 'Installing jetcapture and what it needs into $(VENV) …'; \
	$(INSTALL) '.[demo,spark]'; \
	touch '$@'

$(FOR_SITE): pyproject.toml
	@set -e; for python in $(PYTHON); do if "$$python" -c '$(USABLE)' 2>/dev/null; then break; fi; done; \
	"$$python" -m venv --clear $(SITE_ENV); \
	requirements=$$("$$python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])'); \
	$(SITE_ENV)/bin/python -m pip install --quiet --disable-pip-version-check $$requirements
	@touch '$@'

# after the demonstration's, and not beside it: two installations at once would spoil each other
$(FOR_DEV): $(FOR_DEMO)
	@echo 'Installing the tools of development …'
	@$(INSTALL) '.[dev]'
	@touch '$@'

# Spark runs on the Java of JAVA_HOME or on the PATH; without one, on the extra's
java: $(FOR_DEMO)
	@$(RUN) spark_jobs.java 2>/dev/null || { echo 'Installing Java …'; $(INSTALL) '.[java]' && $(RUN) spark_jobs.java; }
