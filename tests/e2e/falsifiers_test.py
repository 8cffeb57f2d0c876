#!/usr/bin/env python3
# The commands of docs/falsifiers.md on the demo model: they run, print their figures, and the answer's hash is the same
# in all of them. Figures of speed are not judged: the demo's experts fit everywhere.
import os
import re
import subprocess
import sys
import unittest

from stack import MODEL, Stack

BIN = sys.argv.pop(1)


def lode(stack, *arguments):
    """Standard output and standard error of `lode run` against the stack, or against a private one."""
    where = ["--socket", stack.socket] if stack else ["--model", MODEL, "--private", "--daemon-flag=--cpu_workers=1"]
    result = subprocess.run([os.path.join(BIN, "lode"), "run", "--quiet", *where, *arguments],
                            capture_output=True, text=True, timeout=240)
    if result.returncode != 0:
        raise AssertionError(f"{arguments}: {result.stderr}")
    return result.stdout, result.stderr


class Falsifiers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = Stack(BIN)
        cls.stack.wait_ready()

    @classmethod
    def tearDownClass(cls):
        cls.stack.stop()

    def hash_of(self, output):
        return re.search(r"logits_hash=([0-9a-f]{16})", output).group(1)

    def test_drafts_change_the_windows_and_not_the_answer(self):
        base = ["--hash", "--summary", "--timing", "--raw", "-t", "1.2", "-n", "48"]
        prompt = "Once upon a time"
        other, _ = lode(self.stack, *base, "--seed", "8", prompt)
        base += ["--seed", "7"]
        plain, plain_timing = lode(self.stack, *base, "--spec", "1", prompt)
        self.assertNotEqual(self.hash_of(other), self.hash_of(plain))  # something is drawn
        self.assertIn("tokens_per_window=1.00 drafted=0 accepted=0", plain)
        self.assertNotIn("drafts ", plain_timing)
        for flags in (["--spec", "8", "--draft-fixed", "--draft-min-p", "0"],
                      ["--draft-source", "lookup", "--draft-fixed"],
                      ["--draft-source", "head", "--draft-argmax", "--draft-fixed"], ["--draft-coupled"], []):
            output, timing = lode(self.stack, *base, *flags, prompt)
            self.assertEqual(self.hash_of(output), self.hash_of(plain), flags)
            self.assertRegex(timing, r"tokens +\d+\.\d+ per window; drafting \d+\.\d+ s, verifying \d+\.\d+ s")
            if "8" in flags:
                self.assertRegex(timing, r"drafts +head +depth 7: \d+ of \d+ held")
                self.assertGreater(float(re.search(r"tokens_per_window=([\d.]+)", output).group(1)), 1)

    def test_tier_of_a_few_experts(self):
        base = ["--hash", "--summary", "--timing", "-t", "0", "-n", "24"]
        prompt = "Count to ten."
        known, _ = lode(self.stack, *base, prompt)
        few, timing = lode(None, *base, "--expert-slots", "100", prompt)
        none, _ = lode(None, *base, "--expert-slots", "1", "--daemon-flag=--pull_share=1", prompt)
        self.assertEqual(self.hash_of(few), self.hash_of(known))
        self.assertEqual(self.hash_of(none), self.hash_of(known))
        rate = [float(re.search(r"hit_rate=([\d.]+)", text).group(1)) for text in (few, none)]
        self.assertGreater(rate[0], 0.02)  # 100 of 512 experts
        self.assertLess(rate[0], 0.9)
        self.assertLess(rate[1], 0.05)  # one expert
        self.assertRegex(none, r"pcie_share=1\.000")
        for word in ("cpu_wait", "draft", "pull", "GB/s"):
            self.assertIn(word, timing)

    def test_expert_slots_needs_a_private_stack(self):
        with self.assertRaisesRegex(AssertionError, "--expert-slots limits the tier of a private stack"):
            lode(self.stack, "--expert-slots", "4", "hello")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
