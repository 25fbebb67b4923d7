#!/usr/bin/env bash
# Builds, tests and measures on a GPU machine, offline, in one call:
#
#   tools/gpu_check.sh [RESULTS_FOLDER]       default: bench/results/gpu
#
# Needs: python3 >= 3.10 with torch (CUDA), pybind11, cmake, ninja or make, pytest, hypothesis; nvcc;
# GoogleTest where the C++ tests are wanted. Wheels that the machine lacks (pyzmq, typer, rich, safetensors,
# scikit-learn, matplotlib) are taken from the folder .whl when it exists. Every step goes on when one before
# it has failed; the last lines say which did, and the exit status is not 0 then.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

results=${1:-bench/results/gpu}
site=build/gpu/site
mkdir -p "$results" "$site"
export PYTHONPATH="$PWD/$site" PIPEDREAM_CUDA=on
failed=()

step() { # step NAME COMMAND...: runs it, keeps its output, remembers a failure
  local name=$1
  shift
  echo "==> $name"
  if "$@" >"$results/$name.log" 2>&1; then tail -n 3 "$results/$name.log"; else
    failed+=("$name")
    tail -n 30 "$results/$name.log"
  fi
}

{
  echo "commit   $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
  echo "command  $0 $*"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  python3 -c 'import torch; print("torch   ", torch.__version__, "CUDA", torch.version.cuda)'
  nvcc --version | tail -n 1
} | tee "$results/machine.txt"

if compgen -G ".whl/*.whl" >/dev/null; then
  step wheels python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" .whl/*.whl
fi
step install python3 -m pip install -q --no-index --no-build-isolation --no-deps --upgrade --target "$site" .

zmq=$(python3 -c 'import pathlib, zmq; print(next(iter(sorted((pathlib.Path(zmq.__file__).parent.parent / "pyzmq.libs").glob("libzmq*"))), ""))' 2>/dev/null)
export PIPEDREAM_LIBZMQ=$zmq
step configure cmake -S . -B build/gpu/cpp -DPIPEDREAM_CUDA=on -DPIPEDREAM_BUILD_TESTS=ON -DPIPEDREAM_BUILD_PYTHON=OFF \
  -DPIPEDREAM_BUILD_BENCH=ON
step build cmake --build build/gpu/cpp --parallel
step ctest ctest --test-dir build/gpu/cpp --output-on-failure
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    for suite in device weights wire transport channel; do
      step "sanitizer-$tool-$suite" compute-sanitizer --tool "$tool" --error-exitcode 1 \
        "$(find build/gpu/cpp -name "pd_${suite}_test" -type f | head -n 1)"
    done
  done
fi
# The suite runs twice: on the GPU, which its workers share, and on the host of the same machine.
PIPEDREAM_DEVICE=cuda step pytest-cuda python3 -m pytest tests -q
PIPEDREAM_DEVICE=host step pytest-host python3 -m pytest tests -q
# What is off unless asked for: torch's tensors in the planned memory, and offloading to the host.
PIPEDREAM_DEVICE=cuda PIPEDREAM_TORCH_POOL=1 step pytest-torch-pool \
  python3 -m pytest tests/equivalence/test_schedules.py -q
PIPEDREAM_DEVICE=cuda step pytest-offload python3 -m pytest tests/equivalence/test_offloaded_runs.py -q
for example in digits char_lm; do
  step "$example" python3 "examples/$example.py" --workers 2 --output-dir "$results/$example"
done

# Device to device through the channel beside PCIe's copies: on one GPU, and between two where there are two.
bench=$(find build/gpu/cpp -name pd_device_transport_bench -type f | head -n 1)
step bench-device-transport "${bench:-pd_device_transport_bench}"
if (($(nvidia-smi --list-gpus | wc -l) > 1)); then
  step bench-device-transport-two "${bench:-pd_device_transport_bench}" --sender cuda:0 --receiver cuda:1
fi
# The timelines: staged over tcp, staged in shared memory, by CUDA IPC.
for transport in tcp shm ipc; do
  PIPEDREAM_DEVICE=cuda step "timeline-$transport" python3 -m torch.distributed.run --standalone --nproc-per-node 2 \
    bench/system/device_timeline.py --folder "$results/timeline-$transport" --transport "$transport"
done

if ((${#failed[@]})); then
  echo "failed: ${failed[*]}"
  exit 1
fi
echo "all steps passed"
