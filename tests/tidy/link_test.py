#!/usr/bin/env python3
# The process diagram as a test: which binary links what. Called by ctest as: link_test.py NM BIN_DIR
import os
import re
import subprocess
import sys

from files import finish

# Never in the libraries a process loads: pattern of sonames -> why.
FORBIDDEN = {
    "loded": {r"libcud(a|art)\b": "the daemon has no CUDA context"},
    "lode": {r"libcud(a|art)\b": "the command line has no CUDA context", r"prometheus": "only the daemon serves metrics"},
    "lode-gpu-worker": {r"libcuda\b": "the driver is loaded when a device is used", r"prometheus": "only the daemon serves metrics"},
    "lode-cpu-worker": {r"libcud(a|art)\b": "a CPU worker has no CUDA context", r"prometheus": "only the daemon serves metrics"},
}
KERNELS = re.compile(r"\bKernelTable(Scalar|Avx2|Avx512)\b|KernelTable(Scalar|Avx2|Avx512)(v|E)")
# The command line has them for `lode bench kernels` alone.
HAS_KERNELS = {"loded": False, "lode": True, "lode-gpu-worker": True, "lode-cpu-worker": True}


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(nm, folder):
    findings = []
    for name, rules in FORBIDDEN.items():
        binary = os.path.join(folder, name)
        if not os.path.exists(binary):
            findings.append(f"{name}: not built")
            continue
        loaded = output("ldd", binary)
        for line in loaded.splitlines():
            if "not found" in line:
                findings.append(f"{name}: {line.strip()}")
            for pattern, why in rules.items():
                if re.search(pattern, line):
                    findings.append(f"{name} loads {line.split()[0]}: {why}")
        symbols = output(nm, "--defined-only", binary)
        if not symbols:
            findings.append(f"{name}: has no symbols to look at")
        if bool(KERNELS.search(symbols)) != HAS_KERNELS[name]:
            findings.append(f"{name}: {'lacks' if HAS_KERNELS[name] else 'links'} kernels of instruction sets")
    finish(findings, f"{len(FORBIDDEN)} binaries")


main(*sys.argv[1:])
