#!/bin/bash
# Builds the device measurements where they run and executes every section: bits first, then time, a short table last.
# Usage: tests/device/run.sh OUTDIR, from anywhere, on a machine with an NVIDIA GPU (sm_90) and nvcc.
#        tests/device/run.sh --build DIR: only builds the two binaries into DIR, needs no GPU.
#   LODE_TERM_ORDER_BIN   folder with ready-made binaries term_order and term_order_nofma; used if they start here
#   LODE_BUNDLE           an unpacked bundle: its engine is tested first (tests/device/engine.sh)
#   LODE_ONLY_ENGINE      not empty: nothing but that
#   LODE_HOST_BENCH       host kernel benchmark to run as well (it gets OUTDIR as its argument)
# A section that fails, hangs (60 s) or faults does not stop the others. Results: OUTDIR/term_order.json, OUTDIR/term_order.log.
# Exit status: 0 when every section passed.
set -u
out=${1:?usage: tests/device/run.sh OUTDIR, or: tests/device/run.sh --build DIR}
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
# build NAME DEVICE_FLAG HOST_FLAGS
build() {
  (cd "$root" && "$nvcc" -std=c++20 -O2 -arch="${LODE_CUDA_ARCH:-sm_90}" $2 -I. -Xcompiler "-ffp-contract=off$3" \
    tests/device/term_order.cu -o "$work/$1") >"$work/$1.build" 2>&1
}
# Two builds: the default contracts multiply-add wherever it may, the other never does, and its host half uses FMA
# instructions instead of canonical.h's software Fma. The bits of both must agree with the host and so with each other.
build_both() {
  build term_order "" "" &
  local first=$!
  build term_order_nofma -fmad=false ,-mfma &
  local second=$! status=0
  wait $first || { status=1; cat "$work/term_order.build"; }
  wait $second || { status=1; cat "$work/term_order_nofma.build"; }
  return $status
}
if [ "$out" = --build ]; then
  build_both || exit 1
  mkdir -p "${2:?usage: tests/device/run.sh --build DIR}" && cp "$work/term_order" "$work/term_order_nofma" "$2"
  exit
fi
mkdir -p "$out"
failed=0
if [ -n "${LODE_BUNDLE:-}" ]; then
  "$root/tests/device/engine.sh" "$out" "$LODE_BUNDLE" || failed=1
  [ -z "${LODE_ONLY_ENGINE:-}" ] || exit $failed
fi
log=$out/term_order.log
: >"$log"
starts() { "$1/term_order" --version >/dev/null 2>&1 && "$1/term_order_nofma" --version >/dev/null 2>&1; }

bin=${LODE_TERM_ORDER_BIN:-}
began=$(date +%s)
if [ -n "$bin" ] && starts "$bin"; then
  echo "using the binaries in $bin" | tee -a "$log"
else
  build_both | tee -a "$log"
  bin=$work
fi
echo "build: $(($(date +%s) - began)) s" | tee -a "$log"

# section LABEL BINARY NAME [--bits]: results into $work/LABEL.json and .table
section() {
  local label=$1 binary=$2 name=$3 folder=$work/$1.d
  shift 3
  mkdir -p "$folder"
  timeout -k 5 60 "$bin/$binary" "$name" "$folder" "$@" >>"$log" 2>&1
  local status=$?
  [ $status -eq 0 ] || failed=1
  if [ -s "$folder/$name.json" ]; then
    mv "$folder/$name.json" "$work/$label.json"
    sed "1s/\[$name\]/[$label]/" "$folder/$name.table" >"$work/$label.table"
  else
    echo "{\"pass\": false, \"failures\": [\"no result, exit status $status\"]}" >"$work/$label.json"
    echo "[$label] FAIL: no result, exit status $status (124: over 60 s); see term_order.log" >"$work/$label.table"
  fi
}
labels="exact exact_nofma gemv_q8 gemv_q4 gemm deltanet launch bits_nofma_gemv_q8 bits_nofma_gemv_q4 bits_nofma_gemm bits_nofma_deltanet"
for label in $labels; do
  case $label in
    exact_nofma) section $label term_order_nofma exact ;;
    bits_nofma_*) section $label term_order_nofma "${label#bits_nofma_}" --bits ;;
    *) section $label term_order "$label" ;;
  esac
done

host_bench=${LODE_HOST_BENCH:-}
if [ -n "$host_bench" ] && [ -x "$host_bench" ]; then
  timeout -k 5 60 "$host_bench" "$out" >"$out/host_bench.txt" 2>&1 || echo "host benchmark: exit status $?" >>"$out/host_bench.txt"
elif [ -n "$host_bench" ]; then
  echo "host benchmark $host_bench is not there or not executable: not run" | tee -a "$log"
fi

{
  printf '{"device": "%s", "date": "%s"' "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)" \
    "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
  for label in $labels; do
    printf ',\n"%s": ' "$label"
    cat "$work/$label.json"
  done
  printf '}\n'
} >"$out/term_order.json"

echo "==== term order: summary ($(($(date +%s) - began)) s in all) ====" | tee -a "$log"
for label in $labels; do cat "$work/$label.table"; done | tee -a "$log"
[ -s "$out/host_bench.txt" ] && tail -n 40 "$out/host_bench.txt"
[ $failed -eq 0 ] && echo "ALL SECTIONS PASS" || echo "SOME SECTIONS FAILED"
exit $failed
