#!/usr/bin/env python3
# kill -9 of the daemon in the middle of an answer: the client hears of it, no worker survives, and the next daemon takes over
# the folder and gives the same answer. Called by ctest as: daemon_kill_test.py BIN_DIR
import os
import signal
import subprocess
import sys
import time

from stack import Stack, wait_for

BIN = sys.argv[1]
LODE = os.path.join(BIN, "lode")
PROMPT = "Write a Python function that reads a file."
# Workers notice a broken control stream at once; the kernel's parent-death signal is there too. The promise is two seconds, which
# the test prints; on a machine whose cores are all taken it allows more.
GONE_SECONDS = 20
CLIENT_SECONDS = 60


def run(stack, *flags):
    result = subprocess.run([LODE, "run", "--socket", stack.socket, "-t", "0", "-n", "40", "--no-think", "--hash", *flags, PROMPT],
                            capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "logits_hash=" in result.stdout, result.stdout
    return result.stdout


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"  # a zombie waits for its reaper, it runs nothing
    except OSError:
        return False


def kill_in_mid_answer(stack):
    workers = subprocess.run(["pgrep", "-P", str(stack.process.pid), "-f", "lode-.pu-worker"], capture_output=True, text=True).stdout.split()
    assert len(workers) == 3, workers
    # An answer that cannot end by itself before the kill.
    client = subprocess.Popen([LODE, "run", "--socket", stack.socket, "-t", "0", "-n", "4000", "--raw", PROMPT],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert client.stdout.read(20), "no text came"
    os.kill(stack.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    stack.process.wait()
    wait_for("the end of all workers", GONE_SECONDS, lambda: not any(alive(pid) for pid in workers))
    print(f"all workers were gone {time.monotonic() - killed:.2f} s after the daemon's death")
    _, errors = client.communicate(timeout=CLIENT_SECONDS)
    assert client.returncode not in (0, None), "the client took half an answer for a whole one"
    assert errors.strip(), "the client ended without a word"
    print(f"the client said: {errors.decode().strip()}")


stack = Stack(BIN)
stack.wait_ready()
calm = run(stack)
kill_in_mid_answer(stack)
with open(stack.log_path, "wb") as log:
    stack.process = subprocess.Popen(stack.process.args, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
stack.wait_ready()
again = run(stack)
assert again == calm, f"before: {calm}\nafter: {again}"
stack.stop()
print("ok")
