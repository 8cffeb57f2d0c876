#!/bin/bash
# The engine on a card: bits first, then the doorbell, then windows of full-shape synthetic models; a short table last.
# Usage: tests/device/engine.sh OUTDIR BUNDLE [SECTION...]
#   BUNDLE    an unpacked deploy/bundle.sh archive with the test programs in bin (deploy/bundle.sh BUILD OUT bit_matrix_test
#             engine_kill_test fault_points_test cuda_worker_test cuda_kernels_test window_bench doorbell link_bench)
#   SECTION   any of: probe kernels worker bits_demo bits_synth kill faults doorbell link chat bench_q2 bench_iq3 bench_q4 vram_q2
#             vram_iq3 vram_q4 memcheck initcheck racecheck (default: all but link, vram_* and the sanitizers)
#             bench_*: 12 GiB of device memory; vram_*: 24, 12 and 8 GiB
#   LODE_TEST_SOURCES   folder with tests/models (default: this repository)
#   LODE_SECTION_SECONDS   limit of one section (default 240). A synthetic model of 48 layers takes 31 s (q2_0), 54 s (iq3_s) or 69 s
#             (ud_q4_k_xl) to make, a row count some 5 s
#   LODE_BENCH_LAYERS      layers of the synthetic models (default 48); with 12 a section ends in half a minute, budgets shrink along
#   LODE_BENCH_WINDOWS     timed windows (default 40)
# A section that fails or takes too long does not stop the others. Logs: OUTDIR/SECTION.log; table: OUTDIR/engine.txt. Exit status:
# 0 when every section passed.
# Sections that only run when named, and the programs they need beside the others: drafts (bits of guessing: cuda_kernels_test
# cuda_draft_worker_test cuda_no_trace_test draft_matrix_test), draft_sanitize (cuda_kernels_test under memcheck, initcheck and
# racecheck), acceptance (draft_speed_test), replay (draft_replay_test; a full-shape model is made, 40 s; LODE_REPLAY_MODEL names
# another one).
set -u
out=${1:?usage: tests/device/engine.sh OUTDIR BUNDLE [SECTION...]}
bundle=$(cd "${2:?usage: tests/device/engine.sh OUTDIR BUNDLE [SECTION...]}" && pwd)
shift 2
root=$(cd "$(dirname "$0")/../.." && pwd)
sections=("$@")
[ $# -gt 0 ] || sections=(probe kernels worker doorbell bits_demo bits_synth kill faults chat bench_q2 bench_iq3 bench_q4)
limit=${LODE_SECTION_SECONDS:-240}
mkdir -p "$out"
table=$out/engine.txt
: >"$table"
export LODE_TEST_SOURCES=${LODE_TEST_SOURCES:-$root}
export LODE_TEST_BINARIES=$bundle/bin
export LODE_TEST_DEVICE=cuda
export LD_LIBRARY_PATH=$bundle/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
ulimit -l unlimited 2>/dev/null
bin=$bundle/bin
flagship=synth:qwen3.8-flash-next
gib=$((1024 * 1024 * 1024))
layers=${LODE_BENCH_LAYERS:-48}

# Device memory of a worker whose model has fewer layers: 2 GiB are embedding, head, graphs and reserve whatever the depth.
budget() { echo $((2 * gib + ($1 - 2) * gib * layers / 48)); }
bench() {  # NAME PACK GIB[,GIB...] [key=value...]
  local name=$1 pack=$2 sizes="" size
  for size in ${3//,/ }; do sizes+=${sizes:+,}$(budget "$size"); done
  shift 3
  LODE_BENCH_ROUTING=1 "$bin/window_bench" "$flagship,pack=$pack,layers=$layers" "name=$name" "vram=$sizes" \
    "windows=${LODE_BENCH_WINDOWS:-40}" "$@"
}
# Prompts in windows of 1 to 8 rows through graphs, lanes and CPU workers; deadlines times 100.
sanitize() { LODE_TEST_PATIENCE=100 compute-sanitizer --error-exitcode 1 --tool "$1" "$bin/cuda_worker_test" --gtest_filter='*EverySize*' --gtest_brief=1; }
racecheck_lanes() {
  local kernel only=()
  for kernel in Begin Plan StagedCopy Answer End; do only+=(--kernel-name "kns=${kernel}Kernel"); done
  CUDA_MODULE_LOADING=LAZY LODE_TEST_PATIENCE=100 compute-sanitizer --error-exitcode 1 --tool racecheck "${only[@]}" \
    "$bin/cuda_worker_test" --gtest_filter='*EverySize*' --gtest_brief=1
}
chat() {  # the command line through a private stack, cuda against cpu: same text, same logits
  local device
  for device in cpu cuda; do
    "$bin/lode" run --private --quiet --model "$LODE_TEST_SOURCES/tests/models/demo-q4-with-mtp.gguf" \
      --daemon-flag=--device=$device --raw --hash --timing -t 0 -n 40 "def main():" >"$out/chat.$device.txt" 2>"$out/chat.$device.err"
    cat "$out/chat.$device.err"
  done
  cmp "$out/chat.cpu.txt" "$out/chat.cuda.txt" && cat "$out/chat.cuda.txt"
}
# One pass of the draft head for several sequences, and picks of odd logits. Kernels are loaded lazily: see racecheck below.
sanitize_drafts() {
  local tool bad=0
  for tool in memcheck initcheck racecheck; do
    echo "== $tool, $(date +%T)"
    CUDA_MODULE_LOADING=LAZY compute-sanitizer --error-exitcode 1 --tool $tool "$bin/cuda_kernels_test" --gtest_brief=1 \
      --gtest_filter="${LODE_DRAFT_SANITIZE_FILTER:-CudaGuessTest.Ties*:CudaGuessTest.Rows*:CudaDraftTest.Several*}" || bad=1
  done
  return $bad
}
run() {
  case $1 in
    probe) "$bin/lode-gpu-worker" --probe 3>&1; nvidia-smi --query-gpu=name,driver_version,memory.free --format=csv,noheader; nproc; free -g | sed -n 2p ;;
    kernels) "$bin/cuda_kernels_test" --gtest_brief=1 ;;
    worker) "$bin/cuda_worker_test" --gtest_brief=1 ;;
    bits_demo) LODE_BITS=${LODE_BITS:-40} "$bin/bit_matrix_test" demo ;;
    drafts) "$bin/cuda_kernels_test" --gtest_filter='CudaDraft*:CudaGuess*' --gtest_brief=1 &&
      "$bin/cuda_draft_worker_test" --gtest_brief=1 && "$bin/cuda_no_trace_test" --gtest_brief=1 &&
      "$bin/draft_matrix_test" --gtest_brief=1 ;;
    draft_sanitize) sanitize_drafts ;;
    acceptance) "$bin/draft_speed_test" --gtest_brief=1 ;;
    replay) LODE_REPLAY_MODEL=${LODE_REPLAY_MODEL:-$flagship,pack=q2_0,mtp=1} "$bin/draft_replay_test" --gtest_brief=1 ;;
    bits_synth) LODE_BITS=${LODE_BITS:-40} "$bin/bit_matrix_test" synth ;;
    kill) "$bin/engine_kill_test" --gtest_brief=1 ;;
    faults) "$bin/fault_points_test" --gtest_brief=1 ;;
    doorbell) "$bin/doorbell" 1 && "$bin/doorbell" 4 && "$bin/doorbell" 8 ;;
    link) "$bin/link_bench" ;;
    chat) chat ;;
    bench_q2) bench q2_0 q2_0 12 split=fixed,balanced ;;
    bench_iq3) bench iq3_s iq3_s 12 split=fixed,balanced ;;
    bench_q4) bench ud_q4_k_xl ud_q4_k_xl 12 split=fixed,balanced ;;
    vram_q2) bench q2_0 q2_0 24,12,8 ;;
    vram_iq3) bench iq3_s iq3_s 24,12,8 ;;
    vram_q4) bench ud_q4_k_xl ud_q4_k_xl 24,12,8 ;;
    memcheck | initcheck) sanitize "$1" ;;
    # A product of three families of types in every shape, and windows that end badly; then the lanes' own kernels inside a whole
    # worker. Lazily loaded kernels, or the tool takes a minute before it begins.
    racecheck) CUDA_MODULE_LOADING=LAZY compute-sanitizer --error-exitcode 1 --tool racecheck "$bin/cuda_kernels_test" --gtest_brief=1 \
      --gtest_filter="${LODE_RACECHECK_FILTER:-CudaQuantize*:*Cpu/Q4_K:*Cpu/IQ3_S:*Cpu/Q2_0:*NotFinite*}" && racecheck_lanes ;;
    *) echo "no section $1"; return 2 ;;
  esac
}
export -f run bench budget sanitize racecheck_lanes chat
export bin bundle flagship gib layers out
export -f sanitize_drafts

failed=0
for section in "${sections[@]}"; do
  began=$(date +%s)
  timeout -k 10 "$limit" bash -c "run $section" >"$out/$section.log" 2>&1
  status=$?
  took=$(($(date +%s) - began))
  if [ $status -eq 0 ]; then verdict=PASS; else verdict="FAIL (status $status)" failed=1; fi
  echo "[$section] $verdict, $took s" | tee -a "$table"
  [ $status -eq 0 ] || tail -n 15 "$out/$section.log" | cut -c1-300
  case $section in
    drafts | acceptance | replay) grep -E "^figure|PASSED|FAILED" "$out/$section.log" ;;
    probe) tail -n 6 "$out/$section.log" ;;
    doorbell) grep -E "doorbell|stopped" "$out/$section.log" ;;
    link) tail -n 60 "$out/$section.log" ;;
    *check | draft_sanitize) grep -E "ERROR SUMMARY|RACECHECK SUMMARY|tests ran|PASSED|FAILED" "$out/$section.log" ;;
    bits_*) tail -n 1 "$out/$section.log" ;;
    chat) tail -n 4 "$out/$section.log" ;;
    bench_* | vram_*) grep -E "^\[|stages|ceiling|swaps|ready|failed|vram|nodes" "$out/$section.log" | grep -v "\[info\]" ;;
    kernels | worker | kill | faults) tail -n 3 "$out/$section.log" ;;
  esac | sed 's/^/    /' | cut -c1-600 | tee -a "$table"
done
echo "==== engine on a card ===="
grep '^\[' "$table"
[ $failed -eq 0 ] && echo "ALL SECTIONS PASS" || echo "SOME SECTIONS FAILED"
exit $failed
