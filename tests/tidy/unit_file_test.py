#!/usr/bin/env python3
# systemd finds nothing to say about our unit. Its exit code means little (0 with warnings), so any output fails.
# Called by ctest as: unit_file_test.py BIN_DIR
import os
import re
import shutil
import subprocess
import sys
import tempfile

from files import ROOT, finish, skip


def main(folder):
    if not shutil.which("systemd-analyze"):
        skip("systemd-analyze (package systemd) is not installed")
    with open(os.path.join(ROOT, "deploy/systemd/lode.service"), encoding="utf-8") as file:
        unit = file.read()
    findings = []
    # The only paths that need not exist here: the binary, installed elsewhere in a build tree.
    unit, n = re.subn(r"^ExecStart=/usr/bin/loded", "ExecStart=" + os.path.join(os.path.abspath(folder), "loded"), unit, flags=re.M)
    if n != 1:
        findings.append("lode.service: expected one line ExecStart=/usr/bin/loded ...")
    with tempfile.TemporaryDirectory() as temporary:
        path = os.path.join(temporary, "lode.service")
        with open(path, "w", encoding="utf-8") as file:
            file.write(unit)
        said = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True)
    findings += [line for line in (said.stdout + said.stderr).splitlines() if line.strip()]
    if said.returncode != 0:
        findings.append(f"systemd-analyze ended with {said.returncode}")
    finish(findings, "deploy/systemd/lode.service")


main(sys.argv[1])
