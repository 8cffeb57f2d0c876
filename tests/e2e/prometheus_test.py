#!/usr/bin/env python3
# The page as monitoring sees it: promtool finds nothing, and a real Prometheus scrapes and stores it.
# Called by ctest as: prometheus_test.py BIN_DIR
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
import urllib.parse
import urllib.request

BIN = sys.argv[1]

from stack import Stack, wait_for  # noqa: E402

if not shutil.which("prometheus") or not shutil.which("promtool"):
    print("skipped: prometheus and promtool (package prometheus) are not installed")
    sys.exit(77)

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback only, whatever the environment says


def fetch(url):
    with OPENER.open(url, timeout=30) as response:
        return response.read().decode()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = Stack(BIN)
        cls.stack.wait_ready()
        said = subprocess.run([os.path.join(BIN, "lode"), "run", "--socket", cls.stack.socket, "-t", "0", "-n", "8", "Hello"],
                              capture_output=True, text=True, timeout=120)
        assert said.returncode == 0, said.stderr

    @classmethod
    def tearDownClass(cls):
        cls.stack.stop()

    def test_promtool(self):
        fetch(self.stack.metrics_url)  # the endpoint's own summary is NaN before the first scrape
        page = fetch(self.stack.metrics_url)
        checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
        self.assertEqual((checked.returncode, checked.stdout + checked.stderr), (0, ""))
        samples = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if not line.startswith("#")}
        self.assertGreaterEqual(samples["lode_generated_tokens_total"], 1)
        self.assertEqual(samples['lode_worker_up{worker="gpu0"}'], 1)
        self.assertEqual(samples['lode_worker_up{worker="cpu1"}'], 1)
        self.assertGreater(samples['lode_windows_total{device="0",status="ok"}'], 0)
        hit, pull, cpu = (samples[f'lode_expert_lookups_total{{device="0",lane="{lane}"}}'] for lane in ("hit", "pull", "cpu"))
        self.assertGreater(hit + pull + cpu, 0)
        # Fewer windows than the rate's span have run, so rate and counters must agree.
        self.assertAlmostEqual(samples['lode_hit_rate{device="0"}'], hit / (hit + pull + cpu), places=6)
        self.assertAlmostEqual(samples['lode_pcie_share{device="0"}'], pull / (pull + cpu) if pull + cpu else 0, places=6)

    def test_a_real_prometheus_stores_it(self):
        folder = tempfile.mkdtemp(prefix="lode-prometheus-")
        config = os.path.join(folder, "prometheus.yml")
        target = self.stack.metrics_url.split("/")[2]
        with open(config, "w", encoding="utf-8") as file:
            json.dump({"global": {"scrape_interval": "1s"},
                       "scrape_configs": [{"job_name": "lode", "static_configs": [{"targets": [target]}]}]}, file)
        address = f"127.0.0.1:{free_port()}"
        with open(os.path.join(folder, "log"), "wb") as log:
            server = subprocess.Popen(["prometheus", "--config.file=" + config, "--storage.tsdb.path=" + folder + "/data",
                                       "--web.listen-address=" + address], stdout=log, stderr=log)
        try:
            def query(expression):
                url = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
                try:
                    result = json.loads(fetch(url))["data"]["result"]
                except OSError:
                    self.assertIsNone(server.poll(), "prometheus ended")
                    return []
                return [float(sample["value"][1]) for sample in result]
            wait_for("up = 1", 60, lambda: query('up{job="lode"}') == [1])
            rate = wait_for("lode_hit_rate in the store", 60, lambda: query("lode_hit_rate"))
            self.assertTrue(0 <= rate[0] <= 1)
            self.assertEqual(len(query("lode_pcie_share")), 1)
            self.assertEqual(len(query("histogram_quantile(0.9, lode_window_seconds_bucket)")), 1)
            print(f"\nstored: lode_hit_rate {rate[0]}, lode_pcie_share {query('lode_pcie_share')[0]}")
        finally:
            server.terminate()
            server.wait(60)
            shutil.rmtree(folder, ignore_errors=True)


unittest.main(argv=sys.argv[:1], verbosity=2)
