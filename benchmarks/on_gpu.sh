#!/usr/bin/env bash
# The tests that need one device, and all benchmarks with torch beside, on an NVIDIA GPU under Linux:
#
#   benchmarks/on_gpu.sh [FOLDER]
#
# Everything happens in a copy of the last commit in FOLDER (gpu_run by default): its environment, and
# the results, which do not replace those in benchmarks/results. CUDA=12 or CUDA=13 chooses the version
# of CUDA, which otherwise depends on the driver, and PYTHON= the Python. DRY_RUN=1 only prints the
# commands.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-gpu_run}

# What runs otherwise on a GPU than on the CPU, or may.
tests=(
  tests/core/test_rows.py tests/core/test_properties.py          # ids are merged by sorting
  tests/sparse tests/rules                                        # donated tables change in place
  tests/second_order/test_roots.py tests/second_order/test_shampoo.py # roots by Newton's iteration
  tests/state/test_stochastic_rounding.py tests/state/test_slots.py
  tests/wrappers/test_slots_dtype.py                              # packed slots
  tests/core/test_numerics.py tests/core/test_gradients.py tests/core/test_row_ids.py
  tests/test_contract.py tests/wrappers/test_contract.py tests/golden
)

if [ -n "${DRY_RUN:-}" ]; then
  run() { echo "+ $*"; }
else
  run() { echo "+ $*" && "$@"; }
fi

driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1) || {
  echo "nvidia-smi finds no GPU" >&2
  exit 1
}
if [ -z "${CUDA:-}" ]; then
  if [ "${driver%%.*}" -ge 580 ]; then CUDA=13; else CUDA=12; fi
fi
echo "driver $driver, CUDA $CUDA"

run mkdir -p "$folder"
if [ ! -e "$folder/Makefile" ]; then
  run git archive --output "$folder/optzoo.tar" HEAD
  run tar -xf "$folder/optzoo.tar" -C "$folder"
fi
run cd "$folder"
run make .venv/test.installed .venv/bench.installed PYTHON="${PYTHON:-}"
# In one command, as both ask for certain versions of NVIDIA's libraries.
run .venv/bin/python -m pip install --quiet "jax[cuda$CUDA]" torch
run .venv/bin/python -c "
import jax, torch
assert jax.default_backend() == 'gpu', 'JAX finds no GPU: ' + str(jax.devices())
print(jax.devices(), 'jax', jax.__version__, 'torch', torch.__version__, torch.cuda.is_available())"

# JAX otherwise takes most of the memory, and torch finds none.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
# Operands of matrix products in float32 are rounded to TF32 by default: the second run shows what
# that changes. A test that fails does not end the script.
for precision in highest default; do
  status=0
  JAX_DEFAULT_MATMUL_PRECISION=$precision run .venv/bin/python -m pytest -q -rf \
    -m "not full" --junitxml "tests_$precision.xml" "${tests[@]}" || status=$?
  echo "tests with matrix products in precision $precision: exit status $status"
done
# PEAK=4800 is the bandwidth of the data sheet, in GB/s.
run .venv/bin/python benchmarks/bandwidth.py --rows 10000000 --ids 1000000 ${PEAK:+--peak "$PEAK"} \
  | tee bandwidth.txt
run make bench-full
echo "results: $folder/tests_*.xml, $folder/bandwidth.txt, $folder/benchmarks/results"
