#!/usr/bin/env python3
"""loded under a service manager played by this script: READY only after a token, WATCHDOG from progress, arenas into the fd
store and back after kill -9, nothing left behind, SIGTERM ends with status 0. Usage: service_manager_test.py LODED MODEL"""
import array
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

PATIENCE_S = 60  # a loaded test machine


class Manager:
    def __init__(self, loded, model, folder):
        self.loded, self.model, self.folder = loded, model, folder
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(os.path.join(folder, "notify"))
        self.store = {}

    def start(self):
        """Starts loded the way systemd does: stored fds from 3 on, their names in the environment."""
        fds, names = list(self.store.values()), list(self.store)
        env = dict(os.environ, NOTIFY_SOCKET=os.path.join(self.folder, "notify"), WATCHDOG_USEC="20000000")

        def child():
            if not fds:
                return
            high = [os.dup2(fd, 200 + i) for i, fd in enumerate(fds)]
            for i, fd in enumerate(high):
                os.dup2(fd, 3 + i, inheritable=True)
                os.close(fd)
            os.environ["LISTEN_PID"] = str(os.getpid())

        if fds:
            # LISTEN_PID must name the child itself: a shell fills it in right before exec.
            env.update(LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=":".join(names))
        command = [self.loded, "--model=" + self.model, "--runtime-dir=" + self.folder + "/run", "--listen=",
                   "--metrics-listen=", "--kv-tokens=2048", "--device=cpu", "--no-lock-memory", "--cpu-workers=2",
                   "--cpu-threads=1", "--device-threads=1", "--wait-ms=2000", "--wait-max-ms=10000"]
        self.log = open(os.path.join(self.folder, "log"), "wb")
        self.process = subprocess.Popen(["sh", "-c", 'export LISTEN_PID=$$; exec "$0" "$@"'] + command, env=env,
                                        preexec_fn=child, close_fds=False, stderr=self.log)

    def wait_for(self, wanted):
        """Reads notifications until one holds `wanted`; keeps fds that are to be stored. Returns all that came."""
        seen, end = [], time.time() + PATIENCE_S
        while time.time() < end:
            self.notify.settimeout(max(0.1, end - time.time()))
            try:
                data, ancillary, _, _ = self.notify.recvmsg(4096, socket.CMSG_SPACE(4 * 8))
            except socket.timeout:
                break
            text = data.decode()
            seen.append(text)
            fields = dict(line.split("=", 1) for line in text.split("\n") if "=" in line)
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    got = array.array("i", payload)
                    if "FDSTORE" in fields:
                        self.store[fields["FDNAME"]] = got[0]
            if wanted in text:
                return seen
        raise AssertionError(f"'{wanted}' did not come; got {seen}; log: {self.read_log()}")

    def read_log(self):
        with open(os.path.join(self.folder, "log"), "rb") as log:
            return log.read().decode(errors="replace")

    def children(self):
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as f:
            own = set(f.read().split())
        for task in os.listdir(f"/proc/{self.process.pid}/task"):
            with open(f"/proc/{self.process.pid}/task/{task}/children") as f:
                own |= set(f.read().split())
        return {int(pid) for pid in own if "worker" in open(f"/proc/{pid}/cmdline").read()}


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_gone(pids):
    end = time.time() + 30  # their promise is a second; the machine may be busy
    while any(alive(pid) for pid in pids):
        assert time.time() < end, f"workers {pids} outlived the daemon"
        time.sleep(0.02)


def main():
    with tempfile.TemporaryDirectory(prefix="lode-sm-") as folder:
        manager = Manager(sys.argv[1], sys.argv[2], folder)
        manager.start()
        seen = manager.wait_for("READY=1")
        assert any("STATUS=loading" in s for s in seen), seen
        assert any("EXTEND_TIMEOUT_USEC=" in s for s in seen), seen
        assert set(manager.store) == {"lode-arena-0-of-2", "lode-arena-1-of-2"}, manager.store
        assert "0 adopted" in manager.read_log()
        manager.wait_for("WATCHDOG=1")

        workers = manager.children()
        assert len(workers) == 3, workers
        manager.process.send_signal(signal.SIGKILL)
        manager.process.wait()
        wait_gone(workers)

        manager.start()
        manager.wait_for("READY=1")
        log = manager.read_log()
        assert log.count("adopted from the fd store") == 2, log
        assert "experts of worker 0 of 2" in log and " 0 adopted" not in log, log

        workers = manager.children()
        manager.process.send_signal(signal.SIGTERM)
        assert manager.process.wait(timeout=30) == 0, manager.read_log()
        wait_gone(workers)
        manager.wait_for("STOPPING=1")


main()
