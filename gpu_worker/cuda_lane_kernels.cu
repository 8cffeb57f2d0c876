// See cuda_lane_kernels.h. Sizes at the flagship's shape: a plan of 8 rows has 80 entries and takes
// one block about 3 us, 1 row 1 us; the activations of a row are 3.2 KB, posted writes over PCIe.
// Nothing here is bound by bandwidth: what counts is the number of dependent steps.
#include <utility>

#include "gpu_worker/cuda_lane_kernels.h"
#include "kernels/cuda/platform.h"
#include "kernels/cuda/system.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kPlanThreads = 256;
static_assert(kPlanThreads >= kJobExpertsMax, "one entry per thread in Scan");
constexpr uint32_t kWarp = 32;
constexpr uint32_t kWarps = kPlanThreads / kWarp;
// Looks at the workers' lines: each is a round trip over PCIe of about a microsecond. Every 8th also
// reads abort word, progress and clock. After some 100 us there is no hurry any more.
constexpr uint32_t kLooksPerClock = 8;
constexpr uint32_t kLooksWithoutNap = 100;
constexpr uint32_t kNapNs = 200;
constexpr uint32_t kShortNapNs = 20;  // between looks at device memory
constexpr uint32_t kSentAtOnce = 8;  // words of 16 bytes per thread
constexpr uint32_t kEndBlocksPerRow = 16;
constexpr uint32_t kEndThreads = 256;
constexpr uint32_t kCopyThreadsMax = 1024;

// The threads of one block as a group of lane_work.h.
struct BlockGroup {
  uint32_t* warp_counts;  // shared, [kWarps]

  template <class F>
  LODE_DEVICE_MEMBER void For(uint32_t n, F f) const {
    for (uint32_t i = ThreadId(); i < n; i += ThreadCount()) f(i);
    SyncBlock();
  }
  template <class F>
  LODE_DEVICE_MEMBER uint32_t Scan(uint32_t n, F flag, uint16_t* before) const {
    const uint32_t i = ThreadId(), warp = i / kWarp;
    const uint32_t mine = i < n && flag(i) ? 1u : 0u;
    const uint32_t mask = BallotWarp(mine != 0);
    if (i % kWarp == 0) warp_counts[warp] = PopCount(mask);
    SyncBlock();
    uint32_t base = 0, total = 0;
    for (uint32_t w = 0; w < kWarps; ++w) {
      if (w == warp) base = total;
      total += warp_counts[w];
    }
    if (i < n)
      before[i] = static_cast<uint16_t>(base + PopCount(mask & ((1u << (i % kWarp)) - 1)));
    SyncBlock();
    return total;
  }
  LODE_DEVICE_MEMBER void Min(uint32_t* p, uint32_t x) const { AtomicMin(p, x); }
  LODE_DEVICE_MEMBER void Or(uint32_t* p, uint32_t bits) const { AtomicOr(p, bits); }
};

template <class T>
LODE_DEVICE void CopyWords(T* to, const T* from, uint64_t bytes) {
  const uint32_t* in = reinterpret_cast<const uint32_t*>(from);
  uint32_t* out = reinterpret_cast<uint32_t*>(to);
  for (uint64_t i = ThreadId(); i < bytes / sizeof(uint32_t); i += ThreadCount()) out[i] = in[i];
}

struct PlanArgs {
  uint32_t layer, n_rows, n_forms;
  RoutedIds routed;
  ActForm forms[kActFormsMax];
};

// True once the window cannot end well any more: nothing is rung and nothing is waited for.
LODE_DEVICE bool IsVoid(const LaneConstants& c) {
  return c.block->not_finite != kAllFinite || c.report->fault.status != 0;
}

// A void window computes no expert; its rows' vectors are whatever the buffer holds.
LODE_DEVICE void PlanNothing(const LaneConstants& c, const PlanArgs& a, const LaneParity& p) {
  for (uint32_t i = ThreadId(); i < a.n_rows * c.shape.experts_used; i += ThreadCount())
    p.table[i] = p.results + uint64_t{i} * c.shape.hidden;
  if (ThreadId() == 0) {
    p.lists.list->n_entries = p.lists.list->n_slow = 0;
    p.lists.staged->n_entries = p.lists.staged->n_slow = p.lists.pieces->n = 0;
    *p.tag = 0;
  }
}

// The rows' quantised forms, 16 bytes per store. Each row has its own warps, and a thread loads all
// that it sends (up to kSentAtOnce words: 24 KB in all) before its first store, since a load is 0.6
// us. Loads do not wait for the answer whether to send.
LODE_DEVICE void SendActivations(const LaneConstants& c, const PlanArgs& a, uint32_t parity,
                                 bool send) {
  static_assert(kWindowRowsMax <= kWarps, "a warp per row at least");
  const uint32_t warps = kWarps / a.n_rows, warp = ThreadId() / kWarp;  // of a row; this one
  const uint32_t row = warp / warps, first = warp % warps * kWarp + ThreadId() % kWarp;
  const uint32_t stride = warps * kWarp;
  if (row >= a.n_rows) return;
  uint8_t* slot = c.exchange + c.acts[parity] + row * c.act_row_bytes;
  for (uint32_t f = 0; f < a.n_forms; ++f) {
    const ActForm& form = a.forms[f];
    const Word4* from = reinterpret_cast<const Word4*>(form.from + row * form.stride);
    Word4* to = reinterpret_cast<Word4*>(slot + form.offset);
    const uint32_t words = form.bytes / sizeof(Word4);
    for (uint32_t i = first; i < words; i += stride * kSentAtOnce) {
      Word4 v[kSentAtOnce];
      LODE_UNROLL
      for (uint32_t k = 0; k < kSentAtOnce; ++k) {
        if (i + k * stride < words) v[k] = from[i + k * stride];
      }
      LODE_UNROLL
      for (uint32_t k = 0; k < kSentAtOnce; ++k) {
        if (send && i + k * stride < words) to[i + k * stride] = v[k];
      }
    }
  }
}

// Stores the bell behind everything that the block has written. One thread, behind a barrier: the
// release is cumulative and covers what the other threads stored before.
LODE_DEVICE void Ring(const LaneConstants& c, uint32_t layer, uint64_t tag) {
  StoreReleaseSystem(reinterpret_cast<uint64_t*>(c.exchange + c.bell), tag);
  c.report->marks[layer][static_cast<uint32_t>(LayerMark::kBell)] = ClockNs();
}

// All warps of a block but the first, for work whose parts do not build on each other: no barriers.
struct OtherWarps {
  template <class F>
  LODE_DEVICE_MEMBER void For(uint32_t n, F f) const {
    for (uint32_t i = ThreadId() - kWarp; i < n; i += ThreadCount() - kWarp) f(i);
  }
  LODE_DEVICE_MEMBER void Add(uint32_t* p, uint32_t n) const { AtomicAdd(p, n); }
};

// What only this device needs.
LODE_DEVICE void TellDevice(const LaneConstants& c, const PlanArgs& a, const LaneWork& work,
                            const LayerPlace& place, uint64_t tag) {
  const OtherWarps g;
  const uint32_t parity = a.layer & 1;
  const LaneParity& p = c.parity[parity];
  BuildExpertLists(g, work, c.shape, place, c.staging, p.lists);
  BuildResultTable(g, work, a.n_rows, c.shape, p.results,
                   reinterpret_cast<const float*>(c.exchange + c.results[parity]), p.table);
  AddCounts(g, work, a.n_rows, c.shape, c.report->by_layer[a.layer], c.report->row_lookups);
  if (ThreadId() != kWarp) return;
  *p.tag = tag;
  c.report->marks[a.layer][static_cast<uint32_t>(LayerMark::kPlanned)] = ClockNs();
}

// One block, also for eight rows: several would have to meet before one of them rings, and a fence
// and an atomic are 0.5 us more than what they save. What does not change within a window (settings,
// places, residency) is in shared memory before the launch ahead has ended. Behind that, loads that
// do not depend on each other are issued together: a load is 0.6 us, everything else here is
// barriers of 30 ns. The activations leave before it is known whether the layer rings: then they are
// under way while the plan is made, and the bell's release has little left to wait for. The first
// warp rings while the others do what comes behind the bell.
LODE_KERNEL(kPlanThreads) PlanKernel(LaneConstants c, PlanArgs a) {
  // The next launch may not start early: its blocks would fill the multiprocessors before the copies
  // of the pull lane, which come in a branch, find a place.
  LODE_SHARED LaneWork work;
  LODE_SHARED uint32_t warp_counts[kWarps];
  LODE_SHARED LayerPlace place;
  LODE_SHARED LaneWindow window;
  LODE_SHARED uint16_t residency[kExpertsMax];
  LODE_SHARED RoutedRow routed[kWindowRowsMax];  // ids alone
  LODE_SHARED Word4 job_words[sizeof(ExpertJob) / sizeof(Word4)];
  ExpertJob* const job = reinterpret_cast<ExpertJob*>(job_words);
  const uint32_t parity = a.layer & 1, used = c.shape.experts_used;
  CopyWords(&place, &c.places[a.layer], sizeof(place));
  CopyWords(&window, c.window, sizeof(window));
  const uint16_t* const resident = c.residency + uint64_t{a.layer} * c.shape.experts;
  for (uint32_t i = ThreadId(); i < c.shape.experts; i += ThreadCount()) residency[i] = resident[i];
  SyncBlock();
  const BlockGroup g = {warp_counts};
  BuildJobHead(g, window, a.layer, a.n_rows, place.act_forms, job);
  WaitForPrevious();
  const bool is_void = IsVoid(c);
  const uint32_t entry = ThreadId();
  uint16_t id = 0;
  if (entry < a.n_rows * used)
    id = a.routed.ids[entry / used * a.routed.stride + entry % used];
  SendActivations(c, a, parity, !is_void && window.split.cpu_lane_down == 0);
  if (entry < a.n_rows * used) routed[entry / used].ids[entry % used] = id;
  if (is_void) {
    PlanNothing(c, a, c.parity[parity]);
    return;
  }
  SyncBlock();
  PlanLane(g, routed, a.n_rows, c.shape, residency, window.split, &work);
  const bool ring = work.on_cpu > 0;
  if (ring) {
    BuildJobExperts(g, work, job);
    Word4* const to = reinterpret_cast<Word4*>(c.exchange + c.jobs[parity]);
    for (uint32_t i = ThreadId(); i < JobBytes(work.on_cpu) / sizeof(Word4); i += ThreadCount())
      to[i] = job_words[i];
    SyncBlock();
  }
  const uint64_t tag = JobTag(window.generation, window.window, a.layer);
  if (ThreadId() < kWarp) {
    if (ring && ThreadId() == 0) Ring(c, a.layer, tag);
  } else {
    TellDevice(c, a, work, place, ring ? tag : 0);
  }
}

// Blocks take chunks of ThreadCount() * kLoads words in the order of the list. Arenas never change
// and are read past the first cache: a word is used once.
template <uint32_t kLoads>
LODE_KERNEL(kCopyThreadsMax) StagedCopyKernel(const StagedPieces* list, uint32_t part,
                                              uint32_t words_max, uint64_t* mark) {
  const uint32_t chunk = ThreadCount() * kLoads, per_piece = (words_max + chunk - 1) / chunk;
  const uint32_t items = list->n * per_piece;
  for (uint32_t item = BlockX(); item < items; item += GridX()) {
    const StagedPiece p = list->pieces[item / per_piece];
    const uint32_t begin = part == 0 ? 0 : p.down_at, end = part == 0 ? p.down_at : p.bytes;
    const uint32_t words = (end - begin) / sizeof(Word4);
    const uint32_t first = item % per_piece * chunk + ThreadId();
    const Word4* from = reinterpret_cast<const Word4*>(p.from + begin) + first;
    Word4* to = reinterpret_cast<Word4*>(p.to + begin) + first;
    Word4 v[kLoads];
    LODE_UNROLL
    for (uint32_t k = 0; k < kLoads; ++k) {
      if (first + k * ThreadCount() < words) v[k] = LoadOnce(from + k * ThreadCount());
    }
    LODE_UNROLL
    for (uint32_t k = 0; k < kLoads; ++k) {
      if (first + k * ThreadCount() < words) to[k * ThreadCount()] = v[k];
    }
  }
  if (ThreadId() == 0 && BlockX() < items) AtomicMax(mark, ClockNs());
  LetNextStart();
  // What is read was there before the launch ahead began; only what comes behind relies on both.
  WaitForPrevious();
}

LODE_DEVICE uint8_t* LineOf(const LaneConstants& c, uint32_t worker) {
  return c.exchange + c.workers + worker * c.worker_stride;
}

// What a wait needs, loaded together: a load is 0.6 us. tag 0: the layer rang no bell.
struct WaitFacts {
  uint64_t tag, window, wait_ns, wait_max_ns;
};
LODE_DEVICE WaitFacts LoadWaitFacts(const LaneConstants& c, uint32_t layer) {
  return {*c.parity[layer & 1].tag, c.window->window, c.window->wait_ns, c.window->wait_max_ns};
}

// One warp, lane w for worker w: until every worker has answered, or to the first failure. Most
// looks are at the ack alone, one at a time: a look is a round trip over PCIe of 1.2 us, and a kernel cannot end
// before the last one that it began. Looks are acquires, which cost nothing; a fence would be 0.6
// us.
LODE_DEVICE void AwaitWorkers(const LaneConstants& c, uint32_t layer, const WaitFacts& f) {
  const uint32_t worker = ThreadId();
  const bool mine = worker < c.shape.nodes;
  uint64_t* const ack = reinterpret_cast<uint64_t*>(LineOf(c, mine ? worker : 0) + c.line_ack);
  WaitState state = {};
  LaneFault fault = {};
  WaitVerdict verdict = mine ? WaitVerdict::kWait : WaitVerdict::kAnswered;
  uint32_t failed = 0;
  for (uint32_t look = 0; BallotWarp(verdict == WaitVerdict::kWait) != 0; ++look) {
    const bool thorough = look % kLooksPerClock == 0;
    if (mine && verdict == WaitVerdict::kWait) {
      WorkerLook seen = {};
      uint64_t abort = 0;
      if (thorough) {
        abort = LoadRelaxedSystem(reinterpret_cast<uint64_t*>(c.exchange + c.abort_window));
        seen.progress =
            LoadRelaxedSystem(reinterpret_cast<uint64_t*>(LineOf(c, worker) + c.line_progress));
      }
      seen.ack = LoadAcquireSystem(ack);
      if (thorough) {
        verdict = LookAtWorker(seen, abort, f.window, f.tag, ClockNs(), f.wait_ns, f.wait_max_ns,
                               layer, worker, &state, &fault);
      } else if (seen.ack == f.tag) {
        verdict = WaitVerdict::kAnswered;
      }
    }
    failed = BallotWarp(verdict == WaitVerdict::kFailed);
    if (failed != 0) break;
    if (look > kLooksWithoutNap) Nap(kNapNs);
  }
  // The lowest worker that failed speaks.
  if (failed != 0 && (failed & (0u - failed)) == (1u << worker)) c.report->fault = fault;
  if (worker == 0) c.report->marks[layer][static_cast<uint32_t>(LayerMark::kAnswered)] = ClockNs();
}

// What the workers say of the job they have answered: a round trip that runs beside the loads of
// their vectors. The warp of AwaitWorkers, after it.
struct Said {
  uint32_t status, error_row;
};
LODE_DEVICE Said HearWorkers(const LaneConstants& c) {
  uint8_t* line = LineOf(c, ThreadId() < c.shape.nodes ? ThreadId() : 0);
  return {LoadRelaxedSystem(reinterpret_cast<uint32_t*>(line + c.line_status)),
          LoadRelaxedSystem(reinterpret_cast<uint32_t*>(line + c.line_error_row))};
}
LODE_DEVICE void JudgeAnswers(const LaneConstants& c, uint32_t layer, const Said& said) {
  const uint32_t worker = ThreadId();
  LaneFault fault = {};
  const bool well = worker >= c.shape.nodes || c.report->fault.status != 0 ||
                    JudgeAnswer(said.status, said.error_row, layer, worker, &fault);
  const uint32_t failed = BallotWarp(!well);
  if (failed != 0 && (failed & (0u - failed)) == (1u << worker)) c.report->fault = fault;
}

LODE_KERNEL(kWarp) WaitKernel(LaneConstants c, uint32_t layer) {
  LetNextStart();
  WaitForPrevious();
  const WaitFacts facts = LoadWaitFacts(c, layer);
  if (ThreadId() == 0) c.report->marks[layer][static_cast<uint32_t>(LayerMark::kWait)] = ClockNs();
  if (facts.tag != 0) AwaitWorkers(c, layer, facts);
}

// Block (0, 0) looks over PCIe; the others wait for its word in device memory, so that looks do not
// multiply. It is dispatched first and the grid is far smaller than what a card
// holds at once.
LODE_DEVICE void AwaitAnswers(const LaneConstants& c, uint32_t layer, const WaitFacts& facts,
                              Said* said) {
  if (BlockX() == 0 && BlockY() == 0) {
    if (ThreadId() < kWarp) {
      AwaitWorkers(c, layer, facts);
      SyncWarp();
      if (ThreadId() == 0) StoreReleaseDevice(c.answered, facts.tag);
      *said = HearWorkers(c);
    }
  } else if (ThreadId() < kWarp) {
    while (BallotWarp(LoadAcquireDevice(c.answered) == facts.tag) == 0) Nap(kShortNapNs);
    SyncWarp();
  }
  SyncBlock();
}

// Vectors in registers at a time; more routed experts than this come in several rounds.
constexpr uint32_t kHeld = 16;

LODE_KERNEL(kPlanThreads) AnswerKernel(LaneConstants c, AnswerArgs a, uint32_t layer) {
  LetNextStart();
  WaitForPrevious();
  using canonical::Fma;
  const LaneParity& p = c.parity[layer & 1];
  const uint32_t row = BlockY(), i = BlockX() * kPlanThreads + ThreadId(), used = c.shape.experts_used;
  const bool inside = i < c.shape.hidden;
  const WaitFacts facts = LoadWaitFacts(c, layer);
  const uint64_t tag = facts.tag;
  Said said = {};
  if (BlockX() == 0 && BlockY() == 0 && ThreadId() == 0)
    c.report->marks[layer][static_cast<uint32_t>(LayerMark::kWait)] = ClockNs();
  const float* const* table = p.table + row * used;
  const float* const first = reinterpret_cast<const float*>(c.exchange + c.results[layer & 1]);
  const float* const end = first + uint64_t{kWindowRowsMax} * used * c.shape.hidden;
  const auto from_worker = [&](const float* v) { return v >= first && v < end; };
  const RoutedRow& routed = a.routed[row];
  float held[kHeld] = {};
  LODE_UNROLL
  for (uint32_t k = 0; k < kHeld; ++k) {
    if (k < used && inside && !from_worker(table[k])) held[k] = table[k][i];
  }
  if (tag != 0) AwaitAnswers(c, layer, facts, &said);
  LODE_UNROLL
  for (uint32_t k = 0; k < kHeld; ++k) {
    if (k < used && inside && from_worker(table[k])) {
      held[k] = canonical::FromBits(LoadRelaxedSystem(
          reinterpret_cast<uint32_t*>(const_cast<float*>(table[k] + i))));
    }
  }
  float y = 0;
  LODE_UNROLL
  for (uint32_t k = 0; k < kHeld; ++k) {
    if (k < used) y = Fma(routed.weights[k], held[k], y);
  }
  for (uint32_t k = kHeld; inside && k < used; ++k) {
    y = Fma(routed.weights[k],
            canonical::FromBits(LoadRelaxedSystem(
                reinterpret_cast<uint32_t*>(const_cast<float*>(table[k] + i)))),
            y);
  }
  const uint64_t at = uint64_t{row} * c.shape.hidden + i;
  if (inside) a.y[at] = Fma(a.shared_gate[row], a.shared[at], y);
  if (BlockX() != 0 || BlockY() != 0 || ThreadId() >= kWarp) return;
  if (tag != 0) JudgeAnswers(c, layer, said);
}

LODE_KERNEL(kPlanThreads) BeginKernel(LaneConstants c) {
  LetNextStart();
  WaitForPrevious();
  uint32_t* words = reinterpret_cast<uint32_t*>(c.report);
  for (uint32_t i = ThreadId(); i < sizeof(LaneReport) / sizeof(uint32_t); i += ThreadCount())
    words[i] = 0;
  SyncBlock();
  if (ThreadId() == 0) c.report->began_ns = ClockNs();
  if (ThreadId() < 2) *c.parity[ThreadId()].tag = 0;
  if (ThreadId() == 0) *c.answered = 0;
}

// Every block reads its share of every piece, 16 bytes per load, four in flight per thread.
LODE_KERNEL(kPlanThreads) ProbeKernel(const uint8_t* const* pieces, uint32_t n, uint64_t bytes,
                                      uint32_t* sink) {
  LetNextStart();
  WaitForPrevious();
  constexpr uint32_t kInFlight = 4;
  const uint64_t words = bytes / sizeof(Word4);
  const uint64_t stride = uint64_t{GridX()} * ThreadCount();
  uint32_t sum = 0;
  for (uint32_t p = 0; p < n; ++p) {
    const Word4* from = reinterpret_cast<const Word4*>(pieces[p]);
    for (uint64_t i = BlockX() * ThreadCount() + ThreadId(); i < words; i += kInFlight * stride) {
      LODE_UNROLL
      for (uint32_t k = 0; k < kInFlight; ++k) {
        if (i + k * stride >= words) continue;
        const Word4 v = LoadOnce(from + i + k * stride);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
      }
    }
  }
  if (ThreadId() == 0 || sum == 0x12345678u) sink[BlockX()] = sum;  // keeps the loads
}

LODE_KERNEL(1) StampKernel(uint64_t* stamps, uint32_t index) {
  LetNextStart();
  WaitForPrevious();
  stamps[index] = ClockNs();
}

// Blocks (x, y): part x of row y's logits; y = n_rows: everything else. The last block to arrive
// says that the window is there.
LODE_KERNEL(kEndThreads) EndKernel(EndCopies e, uint32_t n_rows) {
  LetNextStart();
  WaitForPrevious();
  const uint32_t row = BlockY();
  if (row < n_rows) {
    if (e.block->params.rows[row].needs_logits != 0 && e.wants[row].whole != 0) {
      const float* from = e.logits + uint64_t{row} * e.vocab;
      float* to = e.host_logits + uint64_t{row} * e.vocab;
      const uint32_t stride = GridX() * ThreadCount();
      for (uint32_t i = BlockX() * ThreadCount() + ThreadId(); i < e.vocab; i += stride)
        to[i] = from[i];
    }
  } else if (BlockX() == 0) {
    CopyWords(e.host_report, e.report, offsetof(LaneReport, ended_ns));
    if (ThreadId() == 0) {
      *e.host_not_finite = e.block->not_finite;
      e.host_report->ended_ns = ClockNs();
    }
  } else if (BlockX() == 1) {
    CopyWords(e.host_routed, e.routed, uint64_t{e.n_routed} * sizeof(RoutedRow));
  } else if (BlockX() == 2 && e.stamps != nullptr) {
    CopyWords(e.host_stamps, e.stamps, uint64_t{e.n_stamps} * sizeof(uint64_t));
  }
  FenceSystem();
  SyncBlock();
  if (ThreadId() == 0 && AtomicAdd(e.arrived, 1) + 1 == GridX() * GridY()) {
    *e.arrived = 0;
    FenceSystem();
    StoreReleaseSystem(e.done, e.window->sequence);
  }
}

}  // namespace

void LaunchBegin(CUstream_st* stream, const LaneConstants& c) {
  Launch(stream, Grid{1}, kPlanThreads, 0, BeginKernel, c);
}

void LaunchPlan(CUstream_st* stream, const LaneConstants& c, uint32_t layer, uint32_t n_rows,
                const RoutedIds& routed, const ActForm* forms, uint32_t n_forms) {
  PlanArgs args = {layer, n_rows, n_forms, routed, {}};
  for (uint32_t f = 0; f < n_forms; ++f) args.forms[f] = forms[f];
  LaunchAhead(stream, Grid{1}, kPlanThreads, 0, PlanKernel, c, args);
}

void LaunchStagedCopy(CUstream_st* stream, const LaneConstants& c, uint32_t layer, StagedPart part,
                      uint64_t bytes_max, const CopyShape& shape) {
  const auto kernel = shape.loads >= 8   ? &StagedCopyKernel<8>
                      : shape.loads >= 4 ? &StagedCopyKernel<4>
                                         : &StagedCopyKernel<2>;
  LaunchAhead(stream, Grid{shape.blocks}, shape.threads, 0, kernel,
              c.parity[layer & 1].lists.pieces, static_cast<uint32_t>(part),
              static_cast<uint32_t>(bytes_max / sizeof(Word4)),
              &c.report->marks[layer][static_cast<uint32_t>(LayerMark::kPulled)]);
}

bool SetLaunchOverlap(bool on) {
#if defined(LODE_CUDA_EMULATED)
  return on;
#else
  return std::exchange(launches_overlap, on);
#endif
}

void LaunchWait(CUstream_st* stream, const LaneConstants& c, uint32_t layer) {
  LaunchAhead(stream, Grid{1}, kWarp, 0, WaitKernel, c, layer);
}

void LaunchAnswer(CUstream_st* stream, const LaneConstants& c, uint32_t layer, uint32_t n_rows,
                  const AnswerArgs& args) {
  LaunchAhead(stream, Grid{(c.shape.hidden + kPlanThreads - 1) / kPlanThreads, n_rows},
              kPlanThreads, 0, AnswerKernel, c, args, layer);
}

void LaunchProbe(CUstream_st* stream, const uint8_t* const* pieces, uint32_t n, uint64_t bytes,
                 uint32_t* sink) {
  Launch(stream, Grid{kProbeBlocks}, kPlanThreads, 0, ProbeKernel, pieces, n, bytes, sink);
}

void LaunchStamp(CUstream_st* stream, uint64_t* stamps, uint32_t index) {
  Launch(stream, Grid{1}, 1, 0, StampKernel, stamps, index);
}

void LaunchEnd(CUstream_st* stream, const EndCopies& e, uint32_t n_rows) {
  Launch(stream, Grid{kEndBlocksPerRow, n_rows + 1}, kEndThreads, 0, EndKernel, e, n_rows);
}

}  // namespace lode::cuda
