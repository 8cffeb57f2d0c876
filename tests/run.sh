#!/usr/bin/env bash
# Installs what is missing, builds, runs every test. The second command of the README; .ci/run calls it.
#   tests/run.sh [ctest arguments]      e.g.  tests/run.sh -L bits      tests/run.sh -R Tokenizer
set -euo pipefail
cd "$(dirname "$0")/.."
deploy/packages.sh --tests
deploy/build.sh
log=build/release/Testing/Temporary/LastTest.log
rm -f "$log"
# One test at a time: several start whole stacks with spinning threads, which collapse when they share two cores.
status=0
ctest --test-dir build/release --output-on-failure --no-tests=error "$@" || status=$?
# Figures that tests print, whether they passed or not: hashes per model, distances from the references, reasons for skipping.
grep -hE '^ *(bits:|figure:|skipped:|\[ +SKIPPED)' "$log" 2>/dev/null || true
exit $status
