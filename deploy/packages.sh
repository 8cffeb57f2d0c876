#!/usr/bin/env bash
# Installs the Debian packages Lode builds and runs with. Does nothing when all are there. Run by quickstart.sh and tests/run.sh.
#   deploy/packages.sh [--tests]     --tests: also what only the tests need
set -euo pipefail

build="g++ cmake ninja-build ccache mold pkg-config git ca-certificates
  libgrpc++-dev protobuf-compiler-grpc protobuf-compiler libprotobuf-dev libabsl-dev libboost-dev prometheus-cpp-dev
  libcli11-dev libgtest-dev libgmock-dev libnuma-dev libhwloc-dev libsystemd-dev nlohmann-json3-dev libpcre2-dev libutf8proc-dev
  libspdlog-dev libtomlplusplus-dev libxxhash-dev liburing-dev libssl-dev zlib1g-dev python3-jinja2"
tests="prometheus python3-grpcio python3-protobuf python3-numpy libcurl4-openssl-dev systemd curl procps"

wanted=$build
[ "${1:-}" = --tests ] && wanted="$build $tests"
missing=()
for package in $wanted; do
  dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

echo "Installing Debian packages: ${missing[*]}" >&2
sudo=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "packages.sh: these packages are missing and need root to install: ${missing[*]}" >&2; exit 1; }
  sudo=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${sudo[@]}" apt-get update -qq
# Services that packages start by themselves (prometheus) are of no use here.
"${sudo[@]}" env RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
