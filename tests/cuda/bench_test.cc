// Speed of the cuda kernels on a card, printed as tables: products by format, activation rows and
// tile; every stage of a layer at the flagship's width, as captured graphs whose weights do not fit
// the L2. Lines start with "time:". Part of cuda_kernels_test; skipped without a card, or without
// LODE_CUDA_BENCH in the environment.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>

#include "tests/cuda/cuda_engine.h"
#include "tests/cuda/test_card.h"

namespace lode::testing {
namespace {

constexpr int kRepeats = 15;

// LODE_CUDA_BENCH: 1 for everything, else the name of one format (and then one pack).
std::string Wanted() {
  const char* wanted = std::getenv("LODE_CUDA_BENCH");
  return wanted == nullptr || std::string(wanted) == "1" ? "" : wanted;
}

// Median milliseconds of one replay of what `enqueue` enqueues on the stream; nodes of its graph.
struct Replay {
  double ms = -1;
  size_t nodes = 0;
};
Replay Measure(CUstream_st* stream, const std::function<void()>& enqueue) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  Replay result;
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  enqueue();
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &result.nodes), cudaSuccess);
  EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  cuda::Timer* timer = cuda::NewTimer();
  std::vector<double> times;
  for (int i = 0; i < kRepeats + 3; ++i) {
    cuda::StartTimer(timer, stream);
    EXPECT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    const double ms = cuda::StopTimer(timer, stream);
    if (i >= 3) times.push_back(ms);
  }
  cuda::DeleteTimer(timer);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  result.ms = times[kRepeats / 2];
  return result;
}

class CudaBench : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!card_.ok()) GTEST_SKIP() << card_.why_not();
    if (std::getenv("LODE_CUDA_BENCH") == nullptr) GTEST_SKIP() << "LODE_CUDA_BENCH is not set";
  }
  TestCard card_;
};

struct Shape {
  uint32_t rows, columns;
};
// Microseconds of one product among copies that together exceed the L2.
double ProductUs(const TestCard& card, Format format, const Shape& m, uint32_t acts,
                 const cuda::ProductShape& shape, const Buffer& weights, const Buffer& x,
                 const Buffer& y) {
  const size_t bytes = RowBytes(format, m.columns) * m.rows;
  const size_t stride = (bytes + 255) / 256 * 256;
  const uint32_t copies = static_cast<uint32_t>(std::min<size_t>(
      weights.bytes() / stride, std::max<size_t>(4, (size_t{256} << 20) / stride)));
  cuda::MatBatch batch;
  batch.n_tasks = 1;
  batch.n_rows = acts;
  batch.source = {x.as<float>(), m.columns, m.columns, {}};
  const uint32_t len = Info(format).act_block_len;
  if (len != 0) {
    batch.source.form = {.base = x.as<uint8_t>(),
                         .stride = m.columns * 2,
                         .d_offset = m.columns,
                         .sum_offset = m.columns + m.columns / 8,
                         .crumb_offset = len == 64 ? m.columns / 2 : 0};
  }
  const Replay r = Measure(card.stream(), [&] {
    for (uint32_t i = 0; i < copies; ++i) {
      batch.tasks[0] = {weights.as<uint8_t>() + i * stride,
                        RowBytes(format, m.columns),
                        y.as<float>(),
                        m.rows,
                        format,
                        0};
      cuda::KernelsOf(format).mat(card.stream(), batch, shape);
    }
  });
  return 1e3 * r.ms / copies;
}

TEST_F(CudaBench, Products) {
  const Buffer weights = card_.Allocate(size_t{768} << 20), x = card_.Allocate(16 << 20),
               y = card_.Allocate(64 << 20);
  std::vector<uint8_t> noise(weights.bytes());
  uint32_t seed = 1;
  for (size_t i = 0; i + 4 <= noise.size(); i += 4) {
    seed = seed * 1664525u + 1013904223u;
    const uint32_t usual = seed & 0xbfffbfffu;
    std::memcpy(&noise[i], &usual, 4);
  }
  cuda::CopyAsync(weights.as<void>(), noise.data(), noise.size(), card_.stream());
  cuda::CopyAsync(x.as<void>(), noise.data(), x.bytes(), card_.stream());
  cuda::Synchronize(card_.stream());
  const uint32_t sms = card_.facts().multiprocessors;
  for (const Shape& m :
       {Shape{248320, 2560}, Shape{16384, 2560}, Shape{2560, 6144}, Shape{320, 10240},
        Shape{10240, 320}, Shape{1280, 2560}, Shape{512, 2560}}) {
    for (uint32_t f = 0; f < kFormatCount; ++f) {
      const Format format = static_cast<Format>(f);
      const size_t row_bytes = RowBytes(format, m.columns);
      if (!Wanted().empty() && Wanted() != Info(format).name) continue;
      if (row_bytes == 0 || row_bytes * m.rows > weights.bytes()) continue;
      std::string line =
          fmt::format("time: {:7} {:6} x {:5}", Info(format).name, m.rows, m.columns);
      for (const uint32_t acts : {1u, 4u, 8u}) {
        const cuda::ProductShape shape = cuda::ChooseShape(format, m.rows, m.columns, acts, sms);
        const double us = ProductUs(card_, format, m, acts, shape, weights, x, y);
        line += fmt::format(" | {} rows {:7.2f} us {:5.0f} GB/s", acts, us,
                            static_cast<double>(row_bytes) * m.rows / us / 1e3);
      }
      std::printf("%s\n", line.c_str());
    }
  }
  if (!Wanted().empty()) return;
  // Which tile is best, for the shapes that a layer has.
  for (const Shape& m :
       {Shape{16384, 2560}, Shape{2560, 6144}, Shape{320, 10240}, Shape{10240, 320}}) {
    for (const Format format : {Format::kQ8_0, Format::kQ2_0}) {
      for (const uint32_t acts : {1u, 4u}) {
        std::string line = fmt::format("time: tiles {} {} x {}, {} rows:", Info(format).name,
                                       m.rows, m.columns, acts);
        for (const uint32_t tile : {4u, 8u, 16u}) {
          for (const uint32_t threads : {64u, 96u, 128u, 160u, 192u, 256u, 320u}) {
            if (!cuda::ShapeIsValid({tile, threads}, acts)) continue;
            line += fmt::format(" {}/{} {:.2f}", tile, threads,
                                ProductUs(card_, format, m, acts, {tile, threads}, weights, x, y));
          }
        }
        std::printf("%s\n", line.c_str());
      }
    }
  }
}

// A model of the flagship's width with few layers; every stage of it as graphs over all layers.
class Stages {
 public:
  Stages(CudaEngine& engine, uint32_t rows, uint32_t position)
      : e(engine), d(engine.device()), rows(rows) {
    const ModelConfig& c = e.config();
    const auto floats = [&](size_t n) {
      return static_cast<float*>(*d.Allocate("bench", n * kWindowRowsMax * sizeof(float)));
    };
    wide = floats(c.WideWidth()), x = floats(c.hidden), inject = floats(c.streams),
    y = floats(c.hidden);
    shared = floats(c.hidden), logits = floats(c.vocab);
    routed = static_cast<RoutedRow*>(*d.Allocate("bench", sizeof(RoutedRow) * kWindowRowsMax));
    params.n_rows = rows;
    params.n_seqs = 1;
    params.seqs[0] = {0, position, 0, rows};
    for (uint32_t r = 0; r < rows; ++r)
      params.rows[r] = {0, position + r, static_cast<int32_t>(r), 1, 0};
    for (uint32_t l = 0; l < c.layers; ++l) lists.push_back(e.lanes().SpreadList(l, rows));
    d.BeginWindow(params);
    d.Embed(e.weights().embed, wide);
    HcWeights without_gates = e.weights().layers[0].hc_attn;
    without_gates.inject = nullptr;
    d.HcRead(without_gates, wide, x, nullptr);
    cuda::Synchronize(d.stream());
  }
  void Time(const char* what, uint32_t n, const std::function<void(uint32_t)>& op,
            const std::function<bool(uint32_t)>& applies) {
    uint32_t count = 0;
    const Replay r = Measure(d.stream(), [&] {
      count = 0;
      for (uint32_t l = 0; l < n; ++l) {
        if (!applies(l)) continue;
        op(l);
        ++count;
      }
    });
    std::printf("time: %u rows %-22s %8.2f us, %.1f launches\n", rows, what, 1e3 * r.ms / count,
                static_cast<double>(r.nodes) / count);
    std::fflush(stdout);
  }
  void Layer(uint32_t l) {
    const LayerWeights& w = e.weights().layers[l];
    d.BeginLayer(l);
    d.HcRead(w.hc_attn, wide, x, inject);
    Mixer(l);
    d.HcWrite(y, inject, wide);
    d.HcRead(w.hc_ffn, wide, x, inject);
    d.Route(w.moe, x, routed);
    d.LaunchExperts(e.lanes().formats(l), lists[l], x, e.lanes().results(l));
    d.SharedExpert(w.moe, x, shared);
    d.Combine(l, routed, e.lanes(), shared, y);
    d.HcWrite(y, inject, wide);
  }
  void Mixer(uint32_t l) {
    const LayerWeights& w = e.weights().layers[l];
    if (w.attention) {
      d.AttentionInput(w.attn, e.state().attention(l), x);
      d.AttentionSelect(e.state().attention(l));
      d.AttentionOutput(w.attn, e.state().attention(l), y);
    } else {
      d.DeltaInput(w.delta, e.state().delta(l), x);
      d.DeltaRecurrence(e.state().delta(l));
      d.DeltaOutput(w.delta, y);
    }
  }
  void All() {
    const auto& layers = e.weights().layers;
    const uint32_t n = static_cast<uint32_t>(layers.size());
    const auto any = [](uint32_t) { return true; };
    const auto delta = [&](uint32_t l) { return !layers[l].attention; };
    const auto attention = [&](uint32_t l) { return layers[l].attention; };
    Time(
        "hc read", n,
        [&](uint32_t l) {
          HcWeights w = layers[l].hc_attn;
          w.inject = nullptr;
          d.HcRead(w, wide, x, nullptr);
        },
        any);
    Time(
        "hc write", n, [&](uint32_t) { d.HcWrite(y, inject, wide); }, any);
    Time(
        "delta input", n, [&](uint32_t l) { d.DeltaInput(layers[l].delta, e.state().delta(l), x); },
        delta);
    Time(
        "delta recurrence", n, [&](uint32_t l) { d.DeltaRecurrence(e.state().delta(l)); }, delta);
    Time(
        "delta output", n, [&](uint32_t l) { d.DeltaOutput(layers[l].delta, y); }, delta);
    Time(
        "delta input, recurrence", n,
        [&](uint32_t l) {
          d.DeltaInput(layers[l].delta, e.state().delta(l), x);
          d.DeltaRecurrence(e.state().delta(l));
        },
        delta);
    Time(
        "whole DeltaNet mixer", n, [&](uint32_t l) { Mixer(l); }, delta);
    Time(
        "attention input", n,
        [&](uint32_t l) { d.AttentionInput(layers[l].attn, e.state().attention(l), x); },
        attention);
    Time(
        "attention select", n, [&](uint32_t l) { d.AttentionSelect(e.state().attention(l)); },
        attention);
    Time(
        "attention output", n,
        [&](uint32_t l) { d.AttentionOutput(layers[l].attn, e.state().attention(l), y); },
        attention);
    Time(
        "router", n, [&](uint32_t l) { d.Route(layers[l].moe, x, routed); }, any);
    Time(
        "routed experts, all hit", n,
        [&](uint32_t l) {
          d.LaunchExperts(e.lanes().formats(l), lists[l], x, e.lanes().results(l));
        },
        any);
    Time(
        "shared expert", n, [&](uint32_t l) { d.SharedExpert(layers[l].moe, x, shared); }, any);
    Time(
        "combine", n, [&](uint32_t l) { d.Combine(l, routed, e.lanes(), shared, y); }, any);
    Time(
        "head", 1, [&](uint32_t) { d.Head(e.weights().output, x, logits); }, any);
    Time(
        "whole layer", n, [&](uint32_t l) { Layer(l); }, any);
    Time(
        "whole DeltaNet layer", n, [&](uint32_t l) { Layer(l); }, delta);
  }

  CudaEngine& e;
  CudaDevice& d;
  StepParams params = {};
  const uint32_t rows;
  float *wide, *x, *inject, *y, *shared, *logits;
  RoutedRow* routed;
  std::vector<const cuda::ExpertList*> lists;
};

// LODE_CUDA_BENCH_ROWS: one row count, launches overlapping alone. LODE_CUDA_BENCH_POSITION: of the
// window's first row.
TEST_F(CudaBench, StagesOfALayer) {
  const char* const only = std::getenv("LODE_CUDA_BENCH_ROWS");
  const char* const at = std::getenv("LODE_CUDA_BENCH_POSITION");
  std::vector<uint32_t> sizes = {1, 4, 8};
  if (only != nullptr) sizes = {static_cast<uint32_t>(std::atoi(only))};
  const uint32_t position = at == nullptr ? 1000 : static_cast<uint32_t>(std::atoi(at));
  for (const char* pack : {"q2_0", "ud_q4_k_xl"}) {
    if (!Wanted().empty() && pack != std::string("q2_0")) continue;
    StatusOr<std::unique_ptr<CudaEngine>> engine =
        CudaEngine::Create(fmt::format("synth:layers=8,experts=80,vocab=32768,ple=0,pack={}", pack),
                           {.threads = 1, .slots = 1, .context = 4096});
    ASSERT_TRUE(engine.ok()) << engine.status();
    for (const uint32_t rows : sizes) {
      for (const bool overlap : {false, true}) {
        if (sizes.size() == 1 && !overlap) continue;
        cuda::launches_overlap = overlap;  // where the card cannot, nothing changes
        std::printf("time: pack %s, %u rows at position %u, launches %s\n", pack, rows, position,
                    overlap ? "overlap" : "one after the other");
        Stages stages(**engine, rows, position);
        stages.All();
      }
    }
  }
}

// Logits and choice of 512 experts.
TEST_F(CudaBench, Router) {
  constexpr uint32_t kExperts = 512, kColumns = 2560, kCopies = 24;  // exceed the L2
  const size_t bytes = size_t{kExperts} * kColumns * sizeof(float);
  const Buffer weights = card_.Allocate(kCopies * bytes), x = card_.Allocate(8 * kColumns * 4),
               logits = card_.Allocate(8 * kExperts * 4),
               routed = card_.Allocate(8 * sizeof(RoutedRow));
  std::vector<float> noise(kExperts * kColumns);
  uint32_t seed = 1;
  for (float& v : noise) {
    seed = seed * 1664525u + 1013904223u;
    v = static_cast<float>(static_cast<int32_t>(seed)) * 1e-10f;
  }
  for (uint32_t i = 0; i < kCopies; ++i)
    cuda::CopyAsync(weights.as<uint8_t>() + i * bytes, noise.data(), bytes, card_.stream());
  cuda::CopyAsync(x.as<void>(), noise.data(), x.bytes(), card_.stream());
  cuda::Synchronize(card_.stream());
  for (const uint32_t rows : {1u, 4u, 8u}) {
    const auto time = [&](bool logit, bool choose) {
      const Replay r = Measure(card_.stream(), [&] {
        for (uint32_t i = 0; i < kCopies; ++i) {
          cuda::RouterArgs args;
          args.w = weights.as<uint8_t>() + i * bytes, args.row_bytes = kColumns * sizeof(float);
          args.format = Format::kF32, args.x = x.as<float>();
          args.columns = kColumns, args.experts = kExperts, args.logits = logits.as<float>();
          if (logit) cuda::LaunchRouter(card_.stream(), args, rows);
          if (choose)
            cuda::LaunchRoute(card_.stream(),
                              {.logits = logits.as<float>(),
                               .experts = kExperts,
                               .used = 10,
                               .routed = routed.as<RoutedRow>()},
                              rows);
        }
      });
      return 1e3 * r.ms / kCopies;
    };
    std::printf("time: %u rows, router of 512 experts: logits %.2f us, choice %.2f, both %.2f\n",
                rows, time(true, false), time(false, true), time(true, true));
  }
}

// Every launch of a few layers once, without a graph: for a profiler.
TEST_F(CudaBench, LayersOnce) {
  StatusOr<std::unique_ptr<CudaEngine>> engine =
      CudaEngine::Create("synth:layers=8,experts=80,vocab=32768,ple=0,pack=q2_0",
                         {.threads = 1, .slots = 1, .context = 4096});
  ASSERT_TRUE(engine.ok()) << engine.status();
  Stages stages(**engine, 4, 1000);
  for (uint32_t l = 0; l < 8; ++l) stages.Layer(l);
  stages.d.Head((*engine)->weights().output, stages.x, stages.logits);
  cuda::Synchronize(stages.d.stream());
}

}  // namespace
}  // namespace lode::testing
