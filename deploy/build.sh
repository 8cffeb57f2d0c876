#!/usr/bin/env bash
# Configures and builds the release preset into build/release. Arguments go to cmake (configure step).
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset release "$@" >build-configure.log 2>&1 || { cat build-configure.log >&2; rm -f build-configure.log; exit 1; }
rm -f build-configure.log
cmake --build build/release --parallel "$(nproc)"
