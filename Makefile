# make demo · make test · make lint · make bench · make evidence-quick · make wheel-check: each sets up .venv by itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
SHARED ?= $(or $(JUMBO_SHARED),../shared)

.PHONY: demo test lint bench evidence-quick wheel-check clean

demo: $(INSTALLED)
	$(PY) -m demo --out out/demo

# A file at a time on each core, each on one thread: small tensors gain nothing from more.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist loadfile

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# Speed, ten minutes: out/bench/index.html is the page. Begun afresh; `--only TABLE` of the command picks out some.
bench: $(INSTALLED)
	rm -rf out/bench
	$(PY) -m jumbo_core.measure report --quick --out out/bench --markdown docs/benchmarks.md

# The short forms of the evidence runs; the README names the full ones. Needs the data folder (JUMBO_SHARED).
evidence-quick: $(INSTALLED)
	$(PY) -m benchmarks.cifar --quick --data $(SHARED)/data/cifar10 --out out/evidence-quick/cifar.json
	$(PY) -m benchmarks.camvid --quick --data $(SHARED)/data/camvid --out out/evidence-quick/camvid.json
	$(PY) -m benchmarks.forecasting --quick --data $(SHARED)/data/series --out out/evidence-quick/forecasting.json
	$(PY) -m benchmarks.classification --quick --out out/evidence-quick/classification.json
	$(PY) -m benchmarks.distill --quick --data $(SHARED)/data/cifar10 --out out/evidence-quick/distill.json
	$(PY) -m benchmarks.distill_camvid --quick --data $(SHARED)/data/camvid --models out/evidence-quick/distill --out out/evidence-quick/distill_camvid.json
	$(PY) -m jumbo_core.measure scan --out out/evidence-quick/scan.json

# A real fresh environment with the wheel and no extras; slow, so not part of the tests (they check the same by blocking imports).
wheel-check: $(INSTALLED)
	rm -rf out/wheel && $(PY) -m build --wheel --outdir out/wheel
	$(PYTHON) -m venv --clear out/wheel/env
	out/wheel/env/bin/python -m pip install -q -c constraints.txt torch torchvision
	out/wheel/env/bin/python -m pip install -q -c constraints.txt out/wheel/*.whl
	cd out/wheel && env/bin/python -P ../../tests/wheel_without_extras.py  # -P: tests/jumbo_core is not what is meant

# torch and torchvision first and from one index: mixed builds fail to import.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt torch torchvision
	$(PY) -m pip install -q -c constraints.txt -e '.[all,mmseg-lite,dev]'
	touch $@

clean:
	rm -rf $(VENV) out dist
