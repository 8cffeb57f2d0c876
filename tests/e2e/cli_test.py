#!/usr/bin/env python3
# The command line as people and scripts use it: answers on stdout, all else on stderr, exit codes, one sentence per error.
# Called by ctest as: cli_test.py BIN_DIR
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

BIN = sys.argv[1]
LODE = os.path.join(BIN, "lode")

from stack import MODEL, Stack, wait_for  # noqa: E402

RUN_SECONDS = 300


def lode(*arguments, stdin="", **environment):
    env = {k: v for k, v in os.environ.items() if k not in ("LODE_SOCKET", "XDG_RUNTIME_DIR")}
    env.update(environment)
    return subprocess.run([LODE, *arguments], input=stdin, capture_output=True, text=True, timeout=RUN_SECONDS, env=env)


class WithoutDaemon(unittest.TestCase):
    def expect_error(self, result, says, code=1):
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertIn(says, result.stderr)
        self.assertEqual(result.stdout, "")

    def test_help_and_version(self):
        result = lode("--help")
        self.assertEqual(result.returncode, 0)
        for command in ("run", "chat", "status", "tune", "tokenize", "inspect", "eval"):
            self.assertRegex(result.stdout, rf"(?m)^\s+{command}\b")
            self.assertEqual(lode(command, "--help").returncode, 0)
        self.assertRegex(lode("--version").stdout, r"^lode \d+\.\d+")

    def test_wrong_flags_end_with_2(self):
        for arguments in ([], ["nonsense"], ["run"], ["run", "--no-such-flag", "x"], ["run", "-t", "-1", "x"], ["run", "-t", "hot", "x"],
                          ["run", "--top-p", "2", "x"], ["run", "-n", "0", "x"], ["run", "--think", "--no-think", "x"],
                          ["run", "one", "two"], ["eval"], ["eval", "--chunk", "1", "file"], ["status", "extra"]):
            with self.subTest(arguments=arguments):
                result = lode(*arguments)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertTrue(result.stderr.strip())
                self.assertEqual(result.stdout, "")

    def test_values_that_are_no_values(self):
        for arguments, says in ((["-t", "nan"], "'nan'"), (["--top-p", "nan"], "'nan'"), (["--min-p", "inf"], "'inf'"),
                                (["--seed", "18446744073709551616"], "18446744073709551616"), (["--seed", "-1"], "-1"),
                                (["--logit-bias", "5x"], "'5x' is not TOKEN=BIAS"), (["--logit-bias", "5=nan"], "5=nan"),
                                (["--socket", "/x", "--model", MODEL], "--socket"), (["--socket", "/x", "--private"], "--socket")):
            with self.subTest(arguments=arguments):
                result = lode("run", *arguments, "x")
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(says, result.stderr)

    def test_unknown_commands_are_guessed(self):
        for word, says in (("rnu", "did you mean 'run'?"), ("tokenise", "did you mean 'tokenize'?"), ("bogus", "there is no command 'bogus'; there")):
            result = lode(word)
            self.assertEqual(result.returncode, 2)
            self.assertIn(says, result.stderr)
            self.assertIn("inspect", result.stderr)
            self.assertEqual(len(result.stderr.splitlines()), 1)

    def test_texts_that_are_no_text(self):
        for arguments in (["run", "--private", "--model", MODEL, b"a\xffb"], ["tokenize", b"a\xffb"], ["run", "--system", b"a\xffb", "Hi"],
                          ["run", "--stop", b"a\xffb", "Hi"], ["chat", "--system", b"a\xffb"]):
            result = lode(*arguments)
            self.assertEqual(result.returncode, 1, arguments)
            self.assertIn("is not UTF-8: byte 1 (0xff)", result.stderr)
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"abc\xc0")
            file.flush()
            self.expect_error(lode("eval", file.name), "is not UTF-8: byte 3 (0xc0)")

    def test_nobody_there(self):
        self.expect_error(lode("status", "--socket", "/nonexistent/lode.sock"), "no daemon answers on unix:/nonexistent/lode.sock")
        self.expect_error(lode("status", LODE_SOCKET="/nonexistent/lode.sock"), "no daemon answers on unix:/nonexistent/lode.sock")
        self.expect_error(lode("run", "--socket", "127.0.0.1:1", "Hi"), "no daemon answers on 127.0.0.1:1")
        self.expect_error(lode("run", "--private", "Hi"), "--model FILE")

    def test_private_stack_that_cannot_start(self):
        result = lode("run", "--private", "--model", "/nonexistent.gguf", "Hi")
        self.assertEqual(result.returncode, 1)
        self.assertIn("the private daemon ended while", result.stderr)
        self.assertIn("/nonexistent.gguf", result.stderr)
        result = lode("run", "--private", "--model", MODEL, "--daemon-flag=--no-such-option=1", "Hi")
        self.assertEqual(result.returncode, 1)
        self.assertIn("no-such-option", result.stderr.replace("_", "-"))

    def test_inspect(self):
        result = lode("inspect", MODEL)
        self.assertEqual(result.returncode, 0, result.stderr)
        for word in ("qwen4exp", "experts", "RAM, pinned", "24 GiB card"):
            self.assertIn(word, result.stdout)
        tensors = lode("inspect", "--tensors", MODEL).stdout
        self.assertIn("token_embd.weight", tensors)
        self.assertEqual(lode("inspect", "synth:layers=2,experts=8,pack=q2_0").returncode, 0)
        self.expect_error(lode("inspect", "/nonexistent.gguf"), "/nonexistent.gguf")
        self.expect_error(lode("inspect", "synth:layers=banana"), "layers")
        self.expect_error(lode("inspect", __file__), "")


class WithDaemon(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = Stack(BIN)
        cls.stack.wait_ready()
        cls.folder = tempfile.TemporaryDirectory()

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()
        cls.stack.stop()

    def ok(self, command, *arguments, **more):
        result = lode(command, "--socket", self.stack.socket, *arguments, **more)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result

    def path(self, name, content=None):
        path = os.path.join(self.folder.name, name)
        if content is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(content)
        return path

    def test_run(self):
        first = self.ok("run", "-t", "0", "-n", "12", "Write a function.")
        self.assertTrue(first.stdout.strip())
        self.assertTrue(first.stdout.endswith("\n"))
        self.assertEqual(first.stderr, "")
        self.assertEqual(self.ok("run", "-t", "0", "-n", "12", "Write a function.").stdout, first.stdout)
        self.assertEqual(self.ok("run", "-t", "0", "-n", "12", "-", stdin="Write a function.").stdout, first.stdout)
        seeded = [self.ok("run", "-t", "1.5", "--seed", seed, "-n", "12", "Tell").stdout for seed in ("7", "7")]
        self.assertEqual(seeded[0], seeded[1])

    def test_what_changes_the_logits(self):
        def answer(*flags):
            return self.ok("run", "--raw", "-t", "0", "-n", "6", *flags, "def f(x):").stdout

        plain = answer()
        token, text = self.ok("tokenize", " re").stdout.splitlines()[-1].split("\t")
        wanted = ["--logit-bias", token + "=100"]
        self.assertEqual(answer(*wanted), text * 6 + "\n")
        self.assertEqual(answer(*wanted, "--ban", token), plain)  # a mask stands behind biases
        self.assertNotEqual(answer(*wanted, "--presence-penalty", "100"), answer(*wanted))
        long = ["--raw", "-t", "0", "-n", "40", "def f(x):"]
        self.assertNotEqual(self.ok("run", "--repetition-penalty", "2", *long).stdout, self.ok("run", *long).stdout)
        self.assertNotEqual(self.ok("run", "--frequency-penalty", "2", *long).stdout, self.ok("run", *long).stdout)

    def test_found_by_the_environment(self):
        result = lode("run", "-t", "0", "-n", "2", "Hi", LODE_SOCKET=self.stack.socket)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_over_tcp(self):
        result = lode("status", "--socket", self.stack.tcp)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(self.stack.tcp, result.stdout)

    def test_run_reports(self):
        result = self.ok("run", "-t", "0", "-n", "8", "--raw", "--timing", "--summary", "--hash", "def f(x):")
        lines = result.stdout.splitlines()
        self.assertRegex(lines[-1], r"^tokens_per_second=\d+\.\d+ hit_rate=[01]\.\d+ pcie_share=[01]\.\d+ cpu_share=[01]\.\d+$")
        self.assertRegex(lines[-2], r"^tokens_per_window=\d+\.\d+ drafted=\d+ accepted=\d+$")
        self.assertRegex(lines[-3], r"^logits_hash=[0-9a-f]{16}$")
        self.assertNotEqual(lines[-3], "logits_hash=" + "0" * 16)
        for word in ("prompt ", "answer ", "windows ", "stage ", "lane ", "hit ", "pull ", "cpu ", "hit_rate"):
            self.assertIn(word, result.stderr)

    def test_run_refused_by_the_daemon(self):
        for arguments, says in ((["--raw", ""], "no tokens"), (["-n", "1000000", "Hi"], "limits.max_tokens is 1000000"),
                                (["--min-p", "1", "Hi"], "sampling.min_p"), (["--stop", "", "Hi"], "limits.stop")):
            result = lode("run", "--socket", self.stack.socket, *arguments)
            self.assertEqual(result.returncode, 1, arguments)
            self.assertIn(says, result.stderr)
            self.assertEqual(len(result.stderr.splitlines()), 1)
        self.assertEqual(lode("run", "--socket", self.stack.socket, "-", stdin="").returncode, 1)

    def test_chat_keeps_the_conversation_and_survives_a_bad_turn(self):
        turns = "Hello\n/new\n" + "x " * 40000 + "\nWrite a function.\n"
        result = self.ok("chat", "-t", "0", "-n", "6", stdin=turns)
        self.assertEqual(len([line for line in result.stderr.splitlines() if line.startswith("lode: ")]), 1)
        self.assertIn("the context holds", result.stderr)
        self.assertTrue(result.stdout.strip())

    def test_status(self):
        text = self.ok("status").stdout
        for word in ("ready", "demo-q4-with-mtp", "gpu0", "cpu0", "hit_rate", "kv blocks"):
            self.assertIn(word, text)
        status = json.loads(self.ok("status", "--json").stdout)
        self.assertEqual(status["state"], "ready")
        self.assertEqual(len(status["workers"]), 3)

    def test_tokenize(self):
        result = self.ok("tokenize", "Hello wörld\n<|im_end|>")
        ids = [int(line.split("\t")[0]) for line in result.stdout.splitlines()]
        self.assertRegex(result.stderr, rf"^{len(ids)} tokens$")
        self.assertIn("<|im_end|>", result.stdout.splitlines()[-1])
        self.assertGreater(len(self.ok("tokenize", "--raw", "Hello wörld\n<|im_end|>").stdout.splitlines()), len(ids))

    def test_eval(self):
        text = self.path("text.txt", "def is_even(n):\n    return n % 2 == 0\n\n\ndef add(a, b):\n    return a + b\n")
        saved = self.path("saved.json")
        result = self.ok("eval", text, "--chunk", "16", "--save", saved)
        match = re.search(r"nats_per_token=([\d.]+) perplexity=([\d.]+) tokens=(\d+) chunk=16", result.stdout)
        self.assertTrue(match, result.stdout)
        self.assertLess(float(match.group(1)), 12)
        again = self.ok("eval", text, "--chunk", "16", "--compare", saved).stdout
        self.assertIn("top1_agreement=1.0000", again)
        self.assertIn("difference=+0.0000", again)
        for arguments, says in (([text, "--chunk", "8", "--compare", saved], "cannot be compared"),
                                ([self.path("missing.txt")], "cannot read"),
                                ([self.path("one.txt", "a")], "at least two"),
                                ([text, "--compare", text], "is no saved evaluation"),
                                ([text, "--compare", self.path("bad.json", '{"argmax": ["x"], "tokens": []}')], "is damaged"),
                                ([text, "--chunk", "16", "--save", "/nonexistent/file"], "cannot write")):
            result = lode("eval", "--socket", self.stack.socket, "--quiet", *arguments)
            self.assertEqual(result.returncode, 1, arguments)
            self.assertIn(says, result.stderr)


class PrivateStack(unittest.TestCase):
    def private_folders(self):
        return {name for name in os.listdir(self.tmp.name) if name.startswith("lode-private-")}

    def setUp(self):
        self.tmp = tempfile.TemporaryDirectory(prefix="lode-cli-")

    def tearDown(self):
        self.tmp.cleanup()

    def test_run_starts_answers_and_leaves_nothing(self):
        result = lode("run", "--private", "--model", MODEL, "-t", "0", "-n", "4", "--summary", "Hi", TMPDIR=self.tmp.name)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("tokens_per_second=", result.stdout)
        self.assertEqual(self.private_folders(), set())

    def start(self, *arguments):
        env = dict(os.environ, TMPDIR=self.tmp.name)
        return subprocess.Popen([LODE, "run", "--private", "--model", MODEL, "-t", "0", *arguments], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, env=env)

    def test_what_killed_owners_leave_is_removed(self):
        killed = self.start("-n", "4000", "--raw", "def f(x):")
        self.assertTrue(killed.stdout.read(1))
        (name,) = self.private_folders()
        folder = os.path.join(self.tmp.name, name)
        killed.kill()
        killed.communicate()

        def free():
            with open(os.path.join(folder, "control", "lock")) as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                return True
        wait_for("the end of the killed owner's daemon", 60, free)
        os.utime(folder, (0, 0))  # young folders are left alone
        young, foreign = (os.path.join(self.tmp.name, "lode-private-" + end) for end in ("young0", "link00"))
        os.mkdir(young)
        os.symlink("/", foreign)
        living = self.start("-n", "4000", "--stop", "never said", "--raw", "def f(x):")
        self.assertTrue(living.stdout.read(1))
        self.assertNotIn(name, self.private_folders())
        (used,) = self.private_folders() - {os.path.basename(young), os.path.basename(foreign)}
        os.utime(os.path.join(self.tmp.name, used), (0, 0))
        result = lode("run", "--private", "--model", MODEL, "-t", "0", "-n", "1", "Hi", TMPDIR=self.tmp.name)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.private_folders(), {used, os.path.basename(young), os.path.basename(foreign)})
        living.send_signal(signal.SIGINT)
        living.communicate(timeout=60)
        self.assertNotIn(used, self.private_folders())

    def test_interrupt_while_loading_leaves_nothing(self):
        process = self.start("-n", "4", "Hi")
        wait_for("the private folder", 60, self.private_folders)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130)
        self.assertEqual(self.private_folders(), set())

    def test_interrupt_cancels_the_answer(self):
        process = self.start("-n", "4000", "--stop", "never said", "--raw", "def f(x):")
        first = process.stdout.read(1)
        self.assertTrue(first)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        # The model may have ended the answer by itself just before.
        self.assertIn(process.returncode, (0, 130), errors)
        if process.returncode == 130:
            self.assertIn("cancelled", errors)
        self.assertEqual(self.private_folders(), set())


unittest.main(argv=sys.argv[:1], verbosity=2)
