# A private Lode stack for one test file: own folder, own ports, the demo model; its exit is checked too.
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "tests/models/demo-q4-with-mtp.gguf")
# Loading the demo model takes seconds; a busy machine takes its time, a hang does not pass.
READY_SECONDS = 240
STOP_SECONDS = 60


def wait_for(what, seconds, condition):
    """The first true value of condition(), or an error that names what did not happen."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not happen within {seconds} s")
        time.sleep(0.05)


class Stack:
    def __init__(self, bin_dir, *flags):
        self.folder = tempfile.mkdtemp(prefix="lode-e2e-")
        self.log_path = os.path.join(self.folder, "log")
        self.socket = os.path.join(self.folder, "lode.sock")
        environment = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "JOURNAL_STREAM", "LISTEN_FDS")}
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [os.path.join(bin_dir, "loded"), "--model", MODEL, "--runtime-dir", self.folder, "--listen", "127.0.0.1:0",
                 "--metrics-listen", "127.0.0.1:0", "--cpu-workers", "2", *flags],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def wait_ready(self):
        def ready():
            if self.process.poll() is not None:
                raise AssertionError(f"loded ended with {self.process.returncode}:\n{self.log()}")
            return re.search(r"\bready$", self.log(), re.M)
        try:
            wait_for("the daemon's readiness", READY_SECONDS, ready)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None
        line = re.search(r"client API at unix:(\S+) (\S+) (http://\S+)", self.log())
        assert line and line.group(1) == self.socket, self.log()
        self.tcp, self.metrics_url = line.group(2), line.group(3)

    def stop(self):
        """SIGTERM; the daemon ends well and leaves no process and no socket."""
        children = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout.split()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the daemon did not stop within {STOP_SECONDS} s:\n{self.log()}") from None
        left = [pid for pid in children if os.path.exists(f"/proc/{pid}")]
        log = self.log()
        socket_left = os.path.exists(self.socket)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert code == 0, f"the daemon ended with {code}:\n{log}"
        assert not left, f"processes left behind: {left}"
        assert not socket_left, "the client socket was left behind"
