#!/bin/sh
# Builds and runs cuda_hardware_check on one Hopper GPU: results first, sanitizers second, timings last; about 5 minutes.
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
