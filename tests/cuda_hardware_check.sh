#!/bin/sh
# Builds and runs cuda_hardware_check on one Hopper GPU: results first, sanitizers second, timings last; about 5 minutes
# of the GPU, after the builds.
#   usage: tests/cuda_hardware_check.sh [short]      its table goes to docs/gpu.md, with the lines at the top
set -e
cd "$(dirname "$0")/.."
out=${TMPDIR:-/tmp}/cuda_hardware_check
nvcc -std=c++20 -O3 -lineinfo -DYOCOU_CUDA -gencode=arch=compute_90a,code=sm_90a -I. \
  tests/cuda_hardware_check.cu -o "$out" -ldl
date -u +%F
git rev-parse --short HEAD
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm --format=csv,noheader
"$out" right
echo "2. the program: greedy text of the language model, twice on the GPU and once on the CPU"
cmake -S . -B "$out.build" -DCMAKE_BUILD_TYPE=Release -DYOCOU_CUDA=ON -DYOCOU_TESTS=OFF >/dev/null
cmake --build "$out.build" >/dev/null
for device in cuda cuda cpu; do
  "$out.build/yocou" generate data/austen.safetensors -p "It is a truth" -n 200 --device $device | cksum
done
"$out.build/yocou" verify --shape tiny -N 1,65,300 --device cuda | tail -1
for tool in memcheck racecheck synccheck; do
  echo "3. compute-sanitizer $tool"
  if command -v compute-sanitizer >/dev/null; then
    timeout 60 compute-sanitizer --tool $tool --error-exitcode 9 "$out" right >"$out.$tool" || [ $? = 124 ] ||
      { tail -20 "$out.$tool"; exit 1; }
  else
    echo "  not installed"
  fi
done
exec "$out" "${1:-all}"
