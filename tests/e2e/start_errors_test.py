#!/usr/bin/env python3
# Starts that cannot succeed: limits of the shell that are too low, a port in use, options that contradict the model, a worker
# that cannot load. Each ends with exit code 1 and one sentence of ours: no library's lines, no signal, no second try.
# Called by ctest as: start_errors_test.py BIN_DIR
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

BIN = sys.argv[1]

from stack import MODEL  # noqa: E402

RUN_SECONDS = 300


def run(program, *arguments, limits=(), **environment):
    env = {k: v for k, v in os.environ.items() if k not in ("LODE_SOCKET", "XDG_RUNTIME_DIR", "NOTIFY_SOCKET", "JOURNAL_STREAM")}
    env.update(environment)

    def lower():
        for which, value in limits:
            resource.setrlimit(which, (value, value))
    return subprocess.run([os.path.join(BIN, program), *arguments], capture_output=True, text=True, timeout=RUN_SECONDS, env=env,
                          stdin=subprocess.DEVNULL, preexec_fn=lower)


class StartErrors(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lode-start-")

    def tearDown(self):
        shutil.rmtree(self.folder)

    def daemon(self, *flags, listen="", metrics_listen="", limits=()):
        return run("loded", "--model", MODEL, "--runtime-dir", self.folder, "--listen", listen, "--metrics-listen", metrics_listen,
                   *flags, limits=limits)

    def expect(self, result, *says):
        """One error, whose last line says all of `says`; the lines before it are the daemon's own log."""
        self.assertEqual(result.returncode, 1, result.stderr)
        lines = result.stderr.splitlines()
        errors = [line for line in lines if " error loded" in line or line.startswith(("loded: ", "lode: "))]
        self.assertEqual(len(errors), 1, result.stderr)
        for word in says:
            self.assertIn(word, errors[0])
        for line in lines:
            self.assertRegex(line, r"^(loded: |lode: |\d{4}-\d\d-\d\dT\S+ (info|warning|error) lode)", result.stderr)

    def test_limits_of_the_daemon(self):
        for limit, value, flag in ((resource.RLIMIT_NOFILE, 10, "ulimit -n"), (resource.RLIMIT_AS, 200_000 << 10, "ulimit -v"),
                                   (resource.RLIMIT_FSIZE, 0, "ulimit -f")):
            with self.subTest(flag):
                self.expect(self.daemon(limits=[(limit, value)]), flag)

    def test_limits_of_the_command_line(self):
        for limit, value, flag in ((resource.RLIMIT_NOFILE, 10, "ulimit -n"), (resource.RLIMIT_AS, 200_000 << 10, "ulimit -v"),
                                   (resource.RLIMIT_FSIZE, 0, "ulimit -f")):
            with self.subTest(flag):
                self.expect(run("lode", "run", "--private", "--model", MODEL, "Hi", limits=[(limit, value)], TMPDIR=self.folder), flag)
                self.assertEqual([name for name in os.listdir(self.folder) if name.startswith("lode-private-")], [])

    def test_segments_above_the_file_limit(self):
        # Enough for the log, too little for the experts.
        self.expect(self.daemon(limits=[(resource.RLIMIT_FSIZE, 2 << 20)]), "ulimit -f", "segment '")

    def test_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = "127.0.0.1:%d" % taken.getsockname()[1]
            self.expect(self.daemon(listen=address), address, "option listen")
            self.expect(self.daemon(metrics_listen=address), address)

    def test_context_that_holds_nothing(self):
        result = self.daemon("--context", "1")
        self.expect(result, "context of 1 tokens", "option context")
        self.assertNotIn("generation 1 started", result.stderr)  # known before any worker loads

    def test_worker_that_cannot_load(self):
        result = self.daemon("--isa", "avx512", "--profile", os.path.join(self.folder, "no-such-profile"))
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("no-such-profile", result.stderr)
        self.assertNotIn("gpu0 generation 2 started", result.stderr)  # once is enough


unittest.main(argv=sys.argv[:1], verbosity=2)
