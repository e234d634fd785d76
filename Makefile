# ARGS adds options: make test ARGS="-k formats -x"
.PHONY: setup check format test test-gpu sanitize bench

setup:  ## Development install, and the pre-commit hooks
	pip install -e '.[test]' pre-commit
	pre-commit install

check:  ## Lint, formatting, types
	ruff check
	ruff format --check
	mypy

format:  ## What check asks for, where it can be done by machine
	ruff check --fix
	ruff format

test:  ## Everything that runs without a GPU; one thread each, or two processes would wait for each other's
	OMP_NUM_THREADS=1 pytest -m "not gpu" -n 2 --dist worksteal $(ARGS)

test-gpu:  ## What needs a CUDA GPU; most of its time, kernels are compiled on the host
	OMP_NUM_THREADS=1 pytest -m gpu -n 8 --dist loadgroup $(ARGS)

TOOL = memcheck
SMALL = groups or several_query or hidden_rows or past_the or are_the_specification or slots_past or see_nothing or long_padding or learn_gives
sanitize:  ## compute-sanitizer on small shapes, on a CUDA GPU; or with TOOL=racecheck
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $(TOOL) --error-exitcode 1 --target-processes all \
		--kernel-name-exclude kns=cudnn python -m pytest -m gpu -n 0 --timeout 0 -k "$(SMALL)" \
		tests/test_hopper_decode.py tests/test_kernels.py tests/test_ops.py $(ARGS)

bench:  ## Decode speed against named peers, on a CUDA GPU
	kvpass bench attention $(ARGS)
