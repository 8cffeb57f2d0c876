#!/usr/bin/env bash
# Installs what is missing, builds, runs every test. The second command of the README; .ci/run calls it.
#   tests/run.sh [ctest arguments]      e.g.  tests/run.sh -L bits      tests/run.sh -R Tokenizer
set -euo pipefail
cd "$(dirname "$0")/.."
deploy/packages.sh --tests
deploy/build.sh
# One test at a time: several start whole stacks with spinning threads, which collapse when they share two cores.
exec ctest --test-dir build/release --output-on-failure --no-tests=error "$@"
