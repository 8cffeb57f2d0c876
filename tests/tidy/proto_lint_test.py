#!/usr/bin/env python3
# buf lint of proto/, where a buf binary is on PATH (Debian has no package of it).
import os
import shutil
import subprocess

from files import ROOT, finish, skip


def main():
    if not shutil.which("buf"):
        skip("no buf on PATH (https://buf.build); protoc has checked the syntax")
    said = subprocess.run(["buf", "lint"], cwd=os.path.join(ROOT, "proto"), capture_output=True, text=True)
    finish((said.stdout + said.stderr).splitlines(), "proto/")


main()
