#!/usr/bin/env bash
# From a fresh Debian machine to a streamed answer: installs packages, builds, starts a private stack with the demo model, streams
# an answer, stops the stack. Nothing stays running and nothing is installed besides Debian packages.
#   deploy/quickstart.sh [PROMPT]
# Last line: tokens_per_second=... hit_rate=... pcie_share=... cpu_share=...
set -euo pipefail
cd "$(dirname "$0")/.."
prompt=${1:-Write a Python function read_file that reads a text file and returns its content.}

deploy/packages.sh
deploy/build.sh >&2
echo >&2
echo "> $prompt" >&2
exec build/release/bin/lode run --private --model tests/models/demo-q4-with-mtp.gguf --no-think \
  --temperature 0 --max-tokens 256 --summary "$prompt"
