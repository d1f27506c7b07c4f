#!/bin/sh
# The whole hardware check on one Hopper GPU, inside 6 minutes (short: 2): results, the program, timings, PyTorch beside
# them, sanitizers. A part that fails or does not fit in its time is a line, and the next one runs.
#   usage: cuda_hardware_check.sh [short] [dry]      dry: no device is asked for, every row says so
# Built with `cmake --build BUILD --target hardware_check`, it lies with all that it runs in BUILD/hardware_check. That
# folder can be carried to a machine that has a driver, glibc and libstdc++. From the sources it builds first.
# Status: 0 all right, 1 something failed, 2 no device.
here=$(cd "$(dirname "$0")" && pwd)
if [ ! -x "$here/cuda_hardware_check" ]; then
  build=$here/../build/hardware
  cmake -S "$here/.." -B "$build" -DYOCOU_CUDA=ON -DYOCOU_TESTS=OFF && cmake --build "$build" --config Release --target hardware_check || exit 1
  exec "$build/hardware_check/cuda_hardware_check.sh" "$@"
fi
export LD_LIBRARY_PATH="$here${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
short= dry= status=0
for word in "$@"; do
  case $word in
    short) short=short ;;
    dry) dry=dry ;;
    *) echo "usage: $0 [short] [dry]" >&2; exit 2 ;;
  esac
done
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
# part SECONDS COMMAND...: what it prints, and a line when it fails or is stopped
part() {
  seconds=$1
  shift
  timeout "$seconds" "$@" 2>&1
  result=$?
  case $result in
    0) ;;
    124) echo "FAILED: stopped after $seconds s: $*" ;;
    *) echo "FAILED: status $result: $*" ;;
  esac
  return $result
}
fit() { if [ "$short" ]; then echo "$1"; else echo "$2"; fi; } # seconds in the short form and in the whole
failed() { if [ "$status" = 0 ]; then status=$1; fi; }
check=$here/cuda_hardware_check

date -u +%F
cat "$here/commit"
if [ -z "$dry" ]; then
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm --format=csv,noheader || {
    echo "no device: nvidia-smi does not answer"
    dry=dry status=2
  }
fi
echo "== results"
part "$(fit 25 60)" "$check" right $dry || failed 1

echo "== the program: greedy text of the language model, twice on the GPU and once on the CPU"
for run in cuda cuda.again cpu; do
  [ "$short" ] && [ $run = cpu ] && continue
  if [ "$dry" ]; then
    echo "  generate, $run: no device"
  elif part 30 "$here/yocou" generate "$here/austen.safetensors" -p "It is a truth" -n 200 --device "${run%.again}" \
    >"$work/$run" 2>"$work/messages"; then
    echo "  generate, $run: $(cksum <"$work/$run")"
  else
    cat "$work/$run" "$work/messages"
    failed 1
  fi
done
if [ "$dry" ]; then
  part 10 "$here/yocou" --version || failed 1
  echo "  verify: no device"
else
  cmp "$work/cuda" "$work/cuda.again" || failed 1
  [ "$short" ] || cmp -s "$work/cuda" "$work/cpu" ||
    echo "  GPU and CPU part somewhere: right only where the CPU's two best logits are closer than the roundings"
  part 20 "$here/yocou" verify --shape tiny -N 1,65,300 --device cuda >"$work/verify" || failed 1
  tail -1 "$work/verify"
fi

echo "== timings"
part "$(fit 55 130)" "$check" speed $short $dry >"$work/speed" || failed 1
cat "$work/speed"

if [ -z "$short" ]; then
  echo "== PyTorch beside them"
  if command -v python3 >/dev/null; then
    part 40 python3 "$here/cuda_hardware_torch.py" "$work/speed" || failed 1
  else
    echo "  no python3"
  fi
fi

# A sanitizer that this machine refuses or that finds no time says so; one that finds something fails the check.
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
for tool in memcheck racecheck synccheck; do
  [ "$short" ] && [ $tool != memcheck ] && continue
  echo "== compute-sanitizer $tool"
  if [ "$dry" ]; then
    echo "  no device"
  elif [ -z "$sanitizer" ]; then
    echo "  not installed"
  else
    timeout "$(fit 15 25)" "$sanitizer" --tool $tool --error-exitcode 9 "$check" few >"$work/$tool" 2>&1
    result=$?
    case $result in
      0) echo "  found nothing" ;;
      9) tail -20 "$work/$tool"; failed 1 ;;
      124) echo "  stopped for lack of time: $(grep -c '^  |' "$work/$tool") rows in, nothing found" ;;
      *) echo "  ended with status $result: $(grep -m1 -i error "$work/$tool")" ;;
    esac
  fi
done
echo "to its end: $(if [ "$dry" ]; then echo "no device, nothing was run"; else echo "status $status"; fi)"
exit $status
