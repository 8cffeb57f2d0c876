#!/usr/bin/env python3
# What an administrator changes and sees while the daemon runs (lode tune, the workers' own counts), and what one life of the
# daemon leaves to the next (the learned expert ranking). Called by ctest as: tune_test.py BIN_DIR
import json
import os
import re
import stat
import subprocess
import sys
import tempfile

from stack import Stack, wait_for

BIN = sys.argv[1]
LODE = os.path.join(BIN, "lode")


def lode(stack, command, *arguments, code=0):
    result = subprocess.run([LODE, command, "--socket", stack.socket, *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == code, f"{arguments}: {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout if code == 0 else result.stderr


def answer(stack, tokens=40):
    out = lode(stack, "run", "-t", "0", "-n", str(tokens), "--raw", "--hash", "--summary", "--spec", "1", "def f(x):")
    summary = out.splitlines()[-1]
    return re.search(r"logits_hash=\w+", out).group(0), float(re.search(r"hit_rate=([\d.]+)", summary).group(1))


def tuned(stack):
    values = dict(line.split(" = ", 1) for line in lode(stack, "tune").splitlines())
    assert {"vram_budget", "pull_share", "tier_policy", "prompt_rows", "split_policy"} <= set(values), values
    calm, hits = answer(stack)
    assert hits > 0, "the tier holds half of the experts"
    # Nothing in VRAM from the next window on, and the same bits; then the first choice again.
    values = lode(stack, "tune", "vram-budget=1", "pull_share=1", "tier_policy=static")
    assert "pull_share = 1\n" in values and "tier_policy = static\n" in values, values
    assert answer(stack) == (calm, 0.0)
    # The policy reaches the GPU worker: the cpu device says what it makes of it.
    lode(stack, "tune", "split_policy=balanced")
    assert answer(stack)[0] == calm
    assert "split policy 'balanced' is not there on the cpu device" in stack.log()
    lode(stack, "tune", "vram_budget=0", "pull_share=-1", "tier_policy=decayed_lfu", "split_policy=fixed")
    assert answer(stack)[0] == calm
    for change, says in (("pull_share=7", "pull_share"), ("kv_tokens=512", "'kv_tokens' cannot be changed"), ("banana", "not option=value")):
        error = lode(stack, "tune", change, code=1)
        assert says in error and len(error.splitlines()) == 1, error


def guarded(stack):
    folder = os.path.join(stack.folder, "control")
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert stat.S_ISSOCK(os.stat(os.path.join(folder, "admin.sock")).st_mode)


def counted(stack):
    def workers():
        status = json.loads(lode(stack, "status", "--json"))
        found = {worker["name"]: worker["statistics"] for worker in status["workers"]}
        return found if found["gpu0"].get("windows_ok", 0) > 0 and all(found.values()) else None
    print(wait_for("the workers' counts", 60, workers))


with tempfile.TemporaryDirectory() as folder:
    profile = os.path.join(folder, "learned")
    flags = ("--profile", profile, "--save-profile", profile)
    first = Stack(BIN, *flags)
    first.wait_ready()
    guarded(first)
    tuned(first)
    counted(first)
    answer(first, 300)  # more windows than a ranking needs to be worth keeping
    first.stop()
    with open(profile, encoding="utf-8") as file:
        pairs = [line.split() for line in file if line.strip() and not line.startswith("#")]
    assert len(pairs) > 8 and all(len(pair) == 3 for pair in pairs), pairs[:3]

    second = Stack(BIN, *flags)
    second.wait_ready()
    assert f"expert ranking of {len(pairs)} pairs from {profile}" in second.log(), second.log()
    before = os.stat(profile).st_mtime_ns
    second.stop()
    assert os.stat(profile).st_mtime_ns == before, "a life without windows overwrote what the last one learned"
print("ok")
