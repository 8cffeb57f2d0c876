// See exchange_harness.h.
#include "tests/cpu_worker/exchange_harness.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cpu_worker/job_check.h"
#include "shared/wire/segment_headers.h"

namespace lode::test {
namespace {

constexpr uint32_t kGeneration = 7;
constexpr uint32_t kLoadThreads = 2;

// One activation or hidden row in the form a weight format reads, owning its bytes.
struct OwnedAct {
  std::vector<uint8_t> bytes;
  ActRow row;
};
OwnedAct MakeAct(const std::vector<float>& x, Format format, bool float_reference,
                 const KernelTable& table) {
  OwnedAct act;
  const uint32_t block = Info(format).act_block_len;
  if (float_reference || block == 0) {
    act.row.f = x.data();
    return act;
  }
  const ActLayout layout = {static_cast<uint32_t>(x.size()), block};
  act.bytes.resize(layout.bytes() + 64);
  uint8_t* base =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(act.bytes.data()) + 63) / 64 * 64);
  EXPECT_TRUE(table.quantize(x.data(), x.size(), block, reinterpret_cast<int8_t*>(base),
                             reinterpret_cast<float*>(base + layout.d_offset()),
                             reinterpret_cast<int16_t*>(base + layout.sum16_offset())));
  act.row = ActRowAt(base, layout);
  return act;
}

std::vector<float> Multiply(const std::vector<uint8_t>& w, Format format, uint32_t n_rows,
                            const std::vector<float>& x, bool float_reference,
                            const KernelTable& table) {
  std::vector<float> y(n_rows);
  const OwnedAct act = MakeAct(x, format, float_reference, table);
  float* out[1] = {y.data()};
  const MatArgs args = {
      w.data(), w.size() / n_rows, n_rows, static_cast<uint32_t>(x.size()), &act.row, 1, out};
  (float_reference ? table.mat_float : table.mat)[static_cast<uint32_t>(format)](args);
  return y;
}

}  // namespace

const char kDemoModel[] = LODE_SOURCE_DIR "/tests/models/demo-q4-with-mtp.gguf";

const KernelTable& ExchangeHarness::Scalar() { return *FindKernelTable("scalar", nullptr); }

Fd ExchangeHarness::Dup(int fd) { return Fd(fcntl(fd, F_DUPFD_CLOEXEC, 3)); }

ExchangeHarness::ExchangeHarness(const std::string& model, uint32_t n_workers) {
  auto source = ModelSource::Open(model);
  if (!source.ok()) {
    ADD_FAILURE() << source.status().message();
    std::abort();
  }
  source_ = std::move(*source);
  const ModelConfig& c = source_->config();
  layout_.shape = {c.hidden, c.expert_width, c.experts_used, n_workers};
  exchange_ = *Segment::Create("exchange", layout_.bytes());
  InitExchange(*exchange_, layout_.shape, 0);
  for (uint32_t n = 0; n < n_workers; ++n) {
    arenas_.push_back(*Segment::Create("arena", ComputeArenaLayout(*source_, n, n_workers)->bytes));
  }
}

ExchangeHarness::~ExchangeHarness() {
  while (!running_.empty()) StopWorker(running_.begin()->first);
}

LoadPlan ExchangeHarness::Plan(uint32_t threads) const {
  LoadPlan plan;
  plan.model = source_->description();
  plan.identity = source_->identity();
  plan.n_nodes = layout_.shape.n_workers;
  plan.threads = threads;
  plan.isa = "auto";
  plan.spin_us = 0;
  plan.wait_ms = 2000;  // generous: tests share two cores with a compiler
  plan.wait_max_ms = 20000;
  plan.device = "cpu";
  return plan;
}

void ExchangeHarness::StartWorker(uint32_t index, const LoadPlan& plan) {
  auto running = std::make_unique<Running>();
  running->worker = std::make_unique<CpuWorker>(index, kGeneration);
  const auto report = running->worker->Load(
      plan, Dup(exchange_->fd()), Dup(arenas_[index]->fd()),
      [](const std::string&, uint64_t, uint64_t) {}, running->stop);
  ASSERT_TRUE(report.ok()) << report.status().message();
  running->thread = std::thread([raw = running.get()] { raw->worker->Run(); });
  running_[index] = std::move(running);
}

void ExchangeHarness::StopWorker(uint32_t index) {
  running_[index]->stop = true;
  running_[index]->thread.join();
  running_.erase(index);
}

void ExchangeHarness::OpenWindow(uint64_t window) {
  window_ = window;
  Publish(header().window_epoch, header().window_epoch.value.load() | 1);
}
void ExchangeHarness::CloseWindow() {
  Publish(header().window_epoch, (header().window_epoch.value.load() | 1) + 1);
}

Routing ExchangeHarness::RandomRouting(uint32_t layer, uint32_t n_rows, uint32_t seed) const {
  std::mt19937 rng(seed * 131 + layer);
  Routing routing;
  std::vector<uint16_t> ids(source_->config().experts);
  std::iota(ids.begin(), ids.end(), uint16_t{0});
  const uint32_t pool = std::min<uint32_t>(source_->config().experts,
                                           2 * shape().experts_used);  // few: rows share experts
  for (uint32_t r = 0; r < n_rows; ++r) {
    if (r == 0) std::shuffle(ids.begin(), ids.end(), rng);
    std::shuffle(ids.begin(), ids.begin() + pool, rng);
    routing.rows.emplace_back(ids.begin(), ids.begin() + shape().experts_used);
    for (uint16_t id : routing.rows.back()) routing.cpu.emplace(id, rng() % 4 != 0);
  }
  return routing;
}

std::vector<std::vector<float>> ExchangeHarness::RandomActivations(uint32_t n_rows,
                                                                   uint32_t seed) const {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<std::vector<float>> x(n_rows, std::vector<float>(shape().hidden));
  for (auto& row : x) {
    for (float& v : row) v = normal(rng);
  }
  return x;
}

ExpertJob ExchangeHarness::MakeJob(uint32_t layer, const Routing& routing,
                                   const std::vector<std::vector<float>>& x, bool float_reference) {
  ExpertJob job = {};
  job.layer = layer;
  job.tag = JobTag(kGeneration, window_, layer);
  job.n_rows = static_cast<uint32_t>(routing.rows.size());
  job.float_reference = float_reference;
  job.act_forms = kActF32;
  for (const auto& [id, cpu] : routing.cpu) {
    if (!cpu) continue;
    JobExpert& e = job.experts[job.n_experts++];
    e.expert = id;
    for (uint32_t r = 0; r < job.n_rows; ++r) {
      for (uint32_t o = 0; o < routing.rows[r].size(); ++o) {
        if (routing.rows[r][o] != id) continue;
        e.rows |= 1u << r;
        e.order[r] = static_cast<uint8_t>(o);
      }
    }
  }
  for (uint32_t r = 0; r < job.n_rows; ++r) {
    uint8_t* base = reinterpret_cast<uint8_t*>(MutableActivation(layer, r));
    std::memcpy(base, x[r].data(), x[r].size() * sizeof(float));
    const uint32_t blocks[] = {32, 64, 256};
    for (uint32_t f = 0; f < 3; ++f) {
      const ActLayout a = {shape().hidden, blocks[f]};
      if (shape().hidden % blocks[f] != 0) continue;
      uint8_t* q = base + layout_.form_offset(f + 1);
      EXPECT_TRUE(Scalar().quantize(x[r].data(), shape().hidden, blocks[f],
                                    reinterpret_cast<int8_t*>(q),
                                    reinterpret_cast<float*>(q + a.d_offset()),
                                    reinterpret_cast<int16_t*>(q + a.sum16_offset())));
      job.act_forms |= 2u << f;
    }
  }
  return job;
}

uint64_t ExchangeHarness::Ring(const ExpertJob& job) {
  std::memcpy(&header().jobs[job.layer & 1], &job, sizeof(job));
  Publish(header().bell, job.tag);
  return job.tag;
}

bool ExchangeHarness::WaitAck(uint32_t index, uint64_t tag, uint32_t timeout_ms) {
  WaitWord& ack = header().workers[index].ack;
  const uint64_t deadline = NowNs() + uint64_t{timeout_ms} * 1'000'000;
  for (;;) {
    const uint64_t seen = ack.value.load(std::memory_order_acquire);
    if (seen == tag) return true;
    if (NowNs() >= deadline) return false;
    WaitChange(ack, seen, {0, deadline});
  }
}

const float* ExchangeHarness::Result(uint32_t layer, uint32_t row, uint32_t order) const {
  const size_t index = size_t{row} * shape().experts_used + order;
  return reinterpret_cast<const float*>(exchange_->data() + layout_.result_offset(layer & 1)) +
         index * shape().hidden;
}
float* ExchangeHarness::MutableActivation(uint32_t layer, uint32_t row) {
  return reinterpret_cast<float*>(exchange_->data() + layout_.acts_offset(layer & 1) +
                                  row * layout_.act_row_bytes());
}

std::vector<float> ExchangeHarness::Expected(uint32_t layer, uint16_t expert,
                                             const std::vector<float>& x, const KernelTable& table,
                                             bool float_reference) const {
  const ExpertTensors t = *FindExperts(*source_, layer);
  const uint32_t width = shape().expert_width, hidden = shape().hidden;
  const auto read = [&](const TensorInfo& tensor, uint64_t first_row,
                        uint32_t n) -> const std::vector<uint8_t>& {
    std::vector<uint8_t>& w = matrices_[fmt::format("{} {}", tensor.name, first_row)];
    if (w.empty()) {
      w.resize(n * tensor.row_bytes());
      EXPECT_TRUE(source_->ReadRows(tensor, first_row, n, w.data()).ok());
    }
    return w;
  };
  const std::vector<float> g = Multiply(read(*t.gate, t.gate_row(expert, 0, width), width),
                                        FormatOf(t.gate->type), width, x, float_reference, table);
  const std::vector<float> u = Multiply(read(*t.up, t.up_row(expert, 0, width), width),
                                        FormatOf(t.up->type), width, x, float_reference, table);
  std::vector<float> h(width);
  table.swiglu(g.data(), u.data(), width, h.data());
  return Multiply(read(*t.down, uint64_t{expert} * hidden, hidden), FormatOf(t.down->type), hidden,
                  h, float_reference, table);
}

void ExchangeHarness::ExpectResults(const ExpertJob& job, const Routing& routing,
                                    const std::vector<std::vector<float>>& x,
                                    bool float_reference) {
  for (uint32_t j = 0; j < job.n_experts; ++j) {
    for (uint32_t r = 0; r < routing.rows.size(); ++r) {
      if ((job.experts[j].rows >> r & 1) == 0) continue;
      const std::vector<float> want =
          Expected(job.layer, job.experts[j].expert, x[r], Scalar(), float_reference);
      const float* got = Result(job.layer, r, job.experts[j].order[r]);
      ASSERT_EQ(std::memcmp(got, want.data(), want.size() * sizeof(float)), 0)
          << "layer " << job.layer << " expert " << job.experts[j].expert << " row " << r << ": "
          << got[0] << " " << want[0];
    }
  }
}

}  // namespace lode::test
