// lode-docgen KIND: prints the documents that are made from lists in the code, so that they cannot
// drift: metrics (docs/metrics.md), config (docs/config.md), example
// (deploy/config/lode.example.toml). Run by people after changing a list, and by tests/tidy, which
// compares with the committed files.
#include <cstdio>
#include <string>

#include "shared/config/config.h"
#include "shared/metrics/metric_list.h"

namespace {

std::string MetricsMarkdown() {
  std::string out =
      "# Metrics\n\nMade from `shared/metrics/metric_list.h` by `lode-docgen metrics`; do not "
      "edit.\n\n"
      "Prometheus scrapes `http://127.0.0.1:7071/metrics` (option `metrics_listen`). Base units: "
      "seconds and bytes; counters end "
      "in `_total` and only grow while the daemon lives; the short request that warms the engine up "
      "at start counts. `device` is the index of the GPU worker, "
      "`lane` is `hit` (expert found in "
      "VRAM), `pull` (read over PCIe) or `cpu` (computed by a CPU worker), `worker` is `gpu0`, "
      "`cpu0`, and so on; families "
      "with that label appear with the first worker. `source` of a draft is `head` (the model's "
      "draft head) or `lookup` (a repetition), `depth` its place behind the last committed token.\n\n"
      "The two rates use one definition everywhere (Status, the last message of a stream, here): "
      "`hit_rate` = pairs found in VRAM / "
      "all distinct routed (layer, expert) pairs; `pcie_share` = misses pulled / misses. Over "
      "other spans take the counters: "
      "`rate(lode_expert_lookups_total{lane=\"hit\"}[5m])` against the sum over lanes.\n\n"
      "| metric | kind | labels | meaning |\n|---|---|---|---|\n";
#define LODE_X(id, name, kind, labels, help)                   \
  out += fmt::format("| `{}` | {} | {} | {} |\n", name, #kind, \
                     *labels ? fmt::format("`{}`", labels) : "", help);
  LODE_METRICS(LODE_X)
#undef LODE_X
  out +=
      "\nThe endpoint's own `exposer_*` families (bytes, scrapes, latencies of the scrapes) come "
      "from the library and are stable.\n";
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string kind = argc == 2 ? argv[1] : "";
  if (kind == "metrics") {
    std::fputs(MetricsMarkdown().c_str(), stdout);
  } else if (kind == "config") {
    std::fputs(lode::OptionsMarkdown().c_str(), stdout);
  } else if (kind == "example") {
    std::fputs(lode::ExampleToml().c_str(), stdout);
  } else {
    std::fputs("usage: lode-docgen metrics | config | example\n", stderr);
    return 2;
  }
  return 0;
}
