#!/usr/bin/env bash
# Configures and builds the release preset into build/release. Arguments go to cmake (configure step).
#   LODE_CUDA_ARCH   architectures of the CUDA kernels, e.g. 90-real; unset: all that releases are built for
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset release ${LODE_CUDA_ARCH:+"-DLODE_CUDA_ARCH=$LODE_CUDA_ARCH"} "$@" >build-configure.log 2>&1 || { cat build-configure.log >&2; rm -f build-configure.log; exit 1; }
rm -f build-configure.log
cmake --build build/release --parallel "$(nproc)"
