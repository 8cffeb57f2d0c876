#!/usr/bin/env python3
# Documents made from lists in the code equal what the code prints now. Called by ctest as: generated_test.py BIN_DIR
#   To make them anew: generated_test.py BIN_DIR --write
import os
import subprocess
import sys

from files import ROOT, finish

MADE = {"metrics": "docs/metrics.md", "config": "docs/config.md", "example": "deploy/config/lode.example.toml"}


def main(folder, write=False):
    findings = []
    for kind, path in MADE.items():
        wanted = subprocess.run([os.path.join(folder, "lode-docgen"), kind], check=True, capture_output=True, text=True).stdout
        full = os.path.join(ROOT, path)
        if write:
            with open(full, "w", encoding="utf-8") as file:
                file.write(wanted)
        have = open(full, encoding="utf-8").read() if os.path.exists(full) else ""
        if have != wanted:
            findings.append(f"{path} is not what the code says; run: lode-docgen {kind} > {path}")
    finish(findings, f"{len(MADE)} generated documents")


main(sys.argv[1], "--write" in sys.argv)
