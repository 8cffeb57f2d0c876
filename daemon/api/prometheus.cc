// See prometheus.h. prometheus-cpp serves the page; a Collectable makes the families from
// EngineCounters and the engine's snapshot when it is scraped, so nothing is registered or counted
// twice.
#include "daemon/api/prometheus.h"

#include <prometheus/exposer.h>
#include <prometheus/metric_family.h>

#include <limits>
#include <utility>
#include <vector>

#include "daemon/api/translate.h"
#include "daemon/draft_source.h"
#include "shared/base/version.h"
#include "shared/metrics/metric_list.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using Labels = std::vector<std::pair<std::string, std::string>>;

// Device index label of every metric that belongs to a GPU worker; one today.
constexpr const char* kDevice = "0";
// Two: a connection that says nothing holds one until its time-out, not the page.
constexpr size_t kServingThreads = 2;
constexpr const char* kReasons[] = {"stop", "length", "cancelled", "error"};

double Value(const Counter& counter) {
  return static_cast<double>(counter.load(std::memory_order_relaxed));
}
double SecondsOf(const Counter& ns) { return Value(ns) * 1e-9; }

ClientMetric WithLabels(const Labels& labels) {
  ClientMetric metric;
  for (const auto& [name, value] : labels) metric.label.push_back({name, value});
  return metric;
}

void Counter1(MetricFamily* family, const Labels& labels, double value) {
  ClientMetric metric = WithLabels(labels);
  metric.counter.value = value;
  family->metric.push_back(std::move(metric));
}
void Gauge1(MetricFamily* family, const Labels& labels, double value) {
  ClientMetric metric = WithLabels(labels);
  metric.gauge.value = value;
  family->metric.push_back(std::move(metric));
}
void Histogram1(MetricFamily* family, const Labels& labels, const DurationHistogram& histogram) {
  ClientMetric metric = WithLabels(labels);
  for (size_t i = 0; i < DurationHistogram::kBuckets; ++i) {
    metric.histogram.bucket.push_back(
        {histogram.CumulativeCount(i), static_cast<double>(DurationHistogram::BoundNs(i)) * 1e-9});
  }
  const uint64_t all = histogram.CumulativeCount(DurationHistogram::kBuckets);
  metric.histogram.bucket.push_back({all, std::numeric_limits<double>::infinity()});
  metric.histogram.sample_count = all;
  metric.histogram.sample_sum = static_cast<double>(histogram.sum_ns()) * 1e-9;
  family->metric.push_back(std::move(metric));
}

struct Sources {
  const ApiContext& context;
  const EngineCounters& c;
  const EngineSnapshot s;
};

void ByLane(MetricFamily* f, const std::array<Counter, kLanes>& counters, double scale) {
  for (uint32_t l = 0; l < kLanes; ++l)
    Counter1(f, {{"device", kDevice}, {"lane", LaneName(l)}}, Value(counters[l]) * scale);
}

// One function per row of LODE_METRICS.
void FillHitRate(const Sources& x, MetricFamily* f) {
  Gauge1(f, {{"device", kDevice}}, x.s.hit_rate);
}
void FillPcieShare(const Sources& x, MetricFamily* f) {
  Gauge1(f, {{"device", kDevice}}, x.s.pcie_share);
}
void FillLookups(const Sources& x, MetricFamily* f) { ByLane(f, x.c.lookups, 1); }
void FillLaneBytes(const Sources& x, MetricFamily* f) { ByLane(f, x.c.lane_bytes, 1); }
void FillLaneSeconds(const Sources& x, MetricFamily* f) { ByLane(f, x.c.lane_ns, 1e-9); }
void FillStageSeconds(const Sources& x, MetricFamily* f) {
  for (uint32_t i = 0; i < kStages; ++i)
    Counter1(f, {{"device", kDevice}, {"stage", StageName(i)}}, SecondsOf(x.c.stage_ns[i]));
}
void FillWindowSeconds(const Sources& x, MetricFamily* f) {
  Histogram1(f, {{"device", kDevice}}, x.c.window_time);
}
void FillWindows(const Sources& x, MetricFamily* f) {
  const std::pair<const char*, const Counter*> rows[] = {{"ok", &x.c.windows_ok},
                                                         {"aborted", &x.c.windows_aborted},
                                                         {"not_finite", &x.c.windows_not_finite},
                                                         {"bad_plan", &x.c.windows_bad_plan},
                                                         {"lost", &x.c.windows_lost}};
  for (const auto& [status, counter] : rows)
    Counter1(f, {{"device", kDevice}, {"status", status}}, Value(*counter));
}
void FillWindowRows(const Sources& x, MetricFamily* f) {
  Counter1(f, {{"device", kDevice}}, Value(x.c.window_rows));
}
void FillTierSwaps(const Sources& x, MetricFamily* f) {
  Counter1(f, {{"device", kDevice}}, Value(x.c.tier_swaps));
}
void FillTierUploadBytes(const Sources& x, MetricFamily* f) {
  Counter1(f, {{"device", kDevice}}, Value(x.c.tier_upload_bytes));
}
void FillResidentExperts(const Sources& x, MetricFamily* f) {
  Gauge1(f, {{"device", kDevice}}, Value(x.c.resident_experts));
}
void FillResidentBytes(const Sources& x, MetricFamily* f) {
  Gauge1(f, {{"device", kDevice}}, Value(x.c.resident_bytes));
}
void FillRequests(const Sources& x, MetricFamily* f) {
  for (size_t i = 0; i < std::size(kReasons); ++i)
    Counter1(f, {{"reason", kReasons[i]}}, Value(x.c.requests_finished[i]));
}
void FillRequestsRefused(const Sources& x, MetricFamily* f) {
  Counter1(f, {}, Value(x.c.requests_refused));
}
void FillPromptTokens(const Sources& x, MetricFamily* f) {
  Counter1(f, {}, Value(x.c.prompt_tokens));
}
void FillGeneratedTokens(const Sources& x, MetricFamily* f) {
  Counter1(f, {}, Value(x.c.answer_tokens));
}
template <class Counters>
void BySourceAndDepth(MetricFamily* f, const Counters& counters) {
  for (uint32_t s = 0; s < kDraftSources; ++s) {
    for (uint32_t depth = 1; depth <= kDraftsMax; ++depth) {
      Counter1(f,
               {{"source", DraftSourceName(static_cast<DraftSource>(s))},
                {"depth", std::to_string(depth)}},
               Value(counters[s][depth]));
    }
  }
}
void FillDraftedTokens(const Sources& x, MetricFamily* f) {
  BySourceAndDepth(f, x.c.drafts_offered);
}
void FillAcceptedDrafts(const Sources& x, MetricFamily* f) {
  BySourceAndDepth(f, x.c.drafts_held);
}
void FillSequenceWindows(const Sources& x, MetricFamily* f) {
  Counter1(f, {}, Value(x.c.decode_shares));
}
void FillTokensPerWindow(const Sources& x, MetricFamily* f) {
  Gauge1(f, {}, x.s.tokens_per_window);
}
void FillDraftSeconds(const Sources& x, MetricFamily* f) {
  Counter1(f, {{"device", kDevice}}, SecondsOf(x.c.draft_ns));
}
void FillVerifySeconds(const Sources& x, MetricFamily* f) {
  Counter1(f, {{"device", kDevice}}, SecondsOf(x.c.verify_ns));
}
void FillTimeToFirstToken(const Sources& x, MetricFamily* f) {
  Histogram1(f, {}, x.c.first_token_time);
}
void FillTokenSeconds(const Sources& x, MetricFamily* f) { Histogram1(f, {}, x.c.token_time); }
void FillQueueSeconds(const Sources& x, MetricFamily* f) { Histogram1(f, {}, x.c.queue_time); }
void FillQueued(const Sources& x, MetricFamily* f) { Gauge1(f, {}, x.s.queued); }
void FillRunning(const Sources& x, MetricFamily* f) { Gauge1(f, {}, x.s.running); }
void FillKvBlocks(const Sources& x, MetricFamily* f) { Gauge1(f, {}, x.s.kv_blocks); }
void FillKvBlocksFree(const Sources& x, MetricFamily* f) { Gauge1(f, {}, x.s.kv_blocks_free); }
void FillWorkerRestarts(const Sources& x, MetricFamily* f) {
  for (const auto& w : x.s.workers) Counter1(f, {{"worker", w.name}}, w.restarts);
}
void FillWorkerUp(const Sources& x, MetricFamily* f) {
  for (const auto& w : x.s.workers) Gauge1(f, {{"worker", w.name}}, w.state == "ready" ? 1 : 0);
}
void FillSequencesRebuilt(const Sources& x, MetricFamily* f) {
  Counter1(f, {}, Value(x.c.sequences_rebuilt));
}
void FillStalls(const Sources& x, MetricFamily* f) { Counter1(f, {}, Value(x.c.stalls)); }
void FillProgressAge(const Sources& x, MetricFamily* f) {
  Gauge1(f, {},
         x.s.last_progress_ns ? static_cast<double>(NowNs() - x.s.last_progress_ns) * 1e-9 : 0);
}
void FillInfo(const Sources& x, MetricFamily* f) {
  // What the option "auto" became, once the engine knows.
  const auto chosen = x.s.facts.find("device");
  const std::string& device =
      chosen == x.s.facts.end() ? x.context.options->device : chosen->second;
  Gauge1(f, {{"version", kVersion}, {"model", x.context.model_id}, {"device", device}}, 1);
}

class EngineCollectable final : public prometheus::Collectable {
 public:
  explicit EngineCollectable(const ApiContext& context) : context_(context) {}

  std::vector<MetricFamily> Collect() const override {
    const Sources sources{context_, *context_.counters, context_.engine->Snapshot()};
    std::vector<MetricFamily> families;
#define LODE_X(id, metric_name, kind, labels, help_text)               \
  {                                                                    \
    MetricFamily family;                                               \
    family.name = metric_name;                                         \
    family.help = help_text;                                           \
    family.type = prometheus::MetricType::kind;                        \
    Fill##id(sources, &family);                                        \
    if (!family.metric.empty()) families.push_back(std::move(family)); \
  }
    LODE_METRICS(LODE_X)
#undef LODE_X
    return families;
  }

 private:
  const ApiContext context_;
};

class MetricsServerImpl final : public MetricsServer {
 public:
  MetricsServerImpl(const std::string& address, const ApiContext& context)
      : collectable_(std::make_shared<EngineCollectable>(context)),
        exposer_(address, kServingThreads) {
    exposer_.RegisterCollectable(collectable_);
    const std::vector<int> ports = exposer_.GetListeningPorts();
    address_ =
        address.substr(0, address.rfind(':')) + ":" + std::to_string(ports.empty() ? 0 : ports[0]);
  }
  std::string address() const override { return address_; }

 private:
  const std::shared_ptr<EngineCollectable> collectable_;
  prometheus::Exposer exposer_;
  std::string address_;
};

}  // namespace

StatusOr<std::unique_ptr<MetricsServer>> StartMetrics(const std::string& address,
                                                      const ApiContext& context) {
  try {
    return StatusOr<std::unique_ptr<MetricsServer>>(
        std::make_unique<MetricsServerImpl>(address, context));
  } catch (const std::exception& error) {  // civetweb's constructor throws when it cannot bind
    return Unavailable(
        "cannot serve metrics on {}: {}; is the address in use? (option metrics_listen)", address,
        error.what());
  }
}

}  // namespace lode
