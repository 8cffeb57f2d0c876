# What the tidy tests share: the tracked files of the tree, and a list of findings that ends the test.
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SKIP = 77  # the exit code ctest shows as "skipped"


def tracked():
    """Paths relative to ROOT. Without git (an unpacked archive): all but build folders."""
    listed = subprocess.run(["git", "-c", "safe.directory=*", "-C", ROOT, "ls-files", "-z"], capture_output=True)
    if listed.returncode == 0 and listed.stdout:
        paths = listed.stdout.decode().split("\0")
    else:
        paths = []
        for folder, folders, names in os.walk(ROOT):
            folders[:] = [f for f in folders if f not in ("build", ".git", "__pycache__")]
            paths += [os.path.relpath(os.path.join(folder, name), ROOT) for name in names]
    return sorted(p for p in paths if p and os.path.isfile(os.path.join(ROOT, p)))


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8", errors="replace") as file:
        return file.read()


def finish(findings, checked):
    for finding in findings:
        print(finding)
    print(f"{checked}: {len(findings)} findings")
    sys.exit(1 if findings else 0)


def skip(reason):
    print("skipped: " + reason)
    sys.exit(SKIP)
