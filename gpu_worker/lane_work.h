// One layer's lanes as the cuda device decides them: the same plan as expert_plan.cc, from it the
// list of experts for the device, the job for the CPU workers and the table of result vectors. Plain
// functions for both compilers over a "group": threads of one block with barriers on the device
// (cuda_lanes.cu), a plain loop on the host (tests, which compare every output with the host's own
// plan). No clock, no memory of its own. Steps 5 and 6 of the life of a token.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu_worker/expert_plan.h"
#include "kernels/canonical.h"
#include "kernels/cuda/experts.h"
#include "shared/base/limits.h"
#include "shared/wire/expert_job.h"

// LODE_FN of canonical.h is for free functions; members of a group need the same without `static`.
#if defined(__CUDACC__)
#define LODE_LANE_MEMBER __forceinline__ __host__ __device__
// A group that exists on one side only makes the compiler warn about the other.
#define LODE_ANY_GROUP _Pragma("nv_exec_check_disable")
#else
#define LODE_LANE_MEMBER inline __attribute__((always_inline))
#define LODE_ANY_GROUP
#endif

namespace lode::cuda {

// ---- what the functions read

// Where one node's arena holds the experts of a layer: pieces [gate | up | down] of its rows.
struct NodePlace {
  const uint8_t* base;  // expert 0, device-readable host memory
  uint64_t stride;      // bytes from expert to expert
  uint64_t up_offset, down_offset;
  uint32_t width_begin, width_end;  // rows of gate and up that the node holds
  uint32_t hidden_begin, hidden_end;
};
// One layer, constant but for `slots`, which moves when the tier's budget changes.
struct LayerPlace {
  const uint8_t* slots;  // slot 0 of the layer in VRAM
  uint64_t slot_bytes;
  uint64_t up_offset, down_offset;  // inside a slot
  uint32_t act_forms;               // ActForms that the CPU workers need
  uint32_t reserved;
  NodePlace nodes[kCpuWorkersMax];
};
// Shape, constant.
struct LaneShape {
  uint32_t experts_used, hidden, width, nodes, experts, layers;
};
// Device memory for pulled experts on their way; constant. Node n's piece of the expert with rank r
// among a layer's pulls comes to base + (r * nodes + n) * piece_bytes and looks there as in the
// arena.
struct Staging {
  uint8_t* base;
  uint64_t piece_bytes;  // at least NodePlace::stride of every layer and node, a multiple of 64
  uint32_t experts;      // 0: kernels read every pulled expert straight from its arena
  uint32_t reserved;
};
// What the copy kernels bring to the staging area: gate and up of all pieces, then down of all.
struct StagedPiece {
  const uint8_t* from;
  uint8_t* to;
  uint32_t down_at, bytes;  // [0, down_at) holds gate and up, [down_at, bytes) down; multiples of 16
};
struct StagedPieces {
  uint32_t n;
  uint32_t reserved;
  StagedPiece pieces[kExpertEntriesMax];
};

// How many of a layer's misses are pulled.
struct LaneSplit {
  uint32_t cpu_lane_down;  // 1: all of them
  uint32_t balanced;       // 0: policy `fixed`, by share_256; 1: by costs
  uint32_t share_256;
  // Policy `balanced`: what one expert costs each lane and what the CPU lane costs before its first,
  // in ns; pull_ns + cpu_ns > 0.
  uint32_t pull_ns, cpu_ns, cpu_fixed_ns;
};

// What changes from window to window; one pinned copy per window.
struct LaneWindow {
  uint64_t sequence;  // of the launch: says that it is over
  uint64_t window;
  uint64_t wait_ns, wait_max_ns;
  uint32_t generation;
  uint32_t cpu_threads;
  uint32_t cpu_isa[kCpuWorkersMax];
  LaneSplit split;
};

// The number of pulls that makes the slower lane fastest: max(k pull, fixed + (misses - k) cpu) is
// smallest at the crossing or beside it. Integers only, so host and device agree.
LODE_FN uint32_t BalancedPulls(uint32_t misses, const LaneSplit& s) {
  const auto cost = [&](uint32_t k) {
    const uint64_t pull = uint64_t{k} * s.pull_ns;
    const uint64_t cpu = k == misses ? 0 : s.cpu_fixed_ns + uint64_t{misses - k} * s.cpu_ns;
    return pull > cpu ? pull : cpu;
  };
  uint64_t k = (uint64_t{misses} * s.cpu_ns + s.cpu_fixed_ns) / (uint64_t{s.pull_ns} + s.cpu_ns);
  if (k > misses) k = misses;
  uint32_t best = static_cast<uint32_t>(k);
  if (best < misses && cost(best + 1) < cost(best)) ++best;
  if (cost(misses) < cost(best)) best = misses;  // no job at all saves its fixed cost
  return best;
}
LODE_FN uint32_t PullsOf(uint32_t misses, const LaneSplit& s) {
  if (s.cpu_lane_down != 0) return misses;
  return s.balanced != 0 ? BalancedPulls(misses, s) : (misses * s.share_256) >> 8;
}

// ---- working memory of one plan (shared memory of a block)
struct LaneWork {
  uint32_t n_experts, misses, on_cpu;
  uint32_t n_by_lane[kLanes];
  uint32_t seen[kExpertsMax];       // [expert of the window] its first entry; others are never read
  uint16_t ids[kJobExpertsMax];     // [row * used + order]
  uint16_t slots[kJobExpertsMax];   // [row * used + order]
  uint16_t before[kJobExpertsMax];  // of a first entry: how many first entries stand before it
  uint16_t missed[kJobExpertsMax];  // [place]: misses before it
  PlannedExpert experts[kJobExpertsMax];

  // The plan's expert of entry i.
  LODE_LANE_MEMBER PlannedExpert& OfEntry(uint32_t i) { return experts[before[seen[ids[i]]]]; }
  LODE_LANE_MEMBER const PlannedExpert& OfEntry(uint32_t i) const {
    return experts[before[seen[ids[i]]]];
  }
};

// Host stand-in for a block: one thread.
struct SerialGroup {
  template <class F>
  LODE_LANE_MEMBER void For(uint32_t n, F f) const {
    for (uint32_t i = 0; i < n; ++i) f(i);
  }
  // before[i] = flags set below i; returns how many are set in all.
  template <class F>
  LODE_LANE_MEMBER uint32_t Scan(uint32_t n, F flag, uint16_t* before) const {
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; ++i) {
      before[i] = static_cast<uint16_t>(count);
      count += flag(i) ? 1 : 0;
    }
    return count;
  }
  LODE_LANE_MEMBER void Min(uint32_t* p, uint32_t x) const { *p = x < *p ? x : *p; }
  LODE_LANE_MEMBER void Or(uint32_t* p, uint32_t bits) const { *p |= bits; }
  LODE_LANE_MEMBER void Add(uint32_t* p, uint32_t n) const { *p += n; }
};

// ---- the plan: equal to PlanExperts (gpu_worker/expert_plan.cc) in every field
LODE_ANY_GROUP
template <class Group>
LODE_FN void PlanLane(const Group& g, const RoutedRow* rows, uint32_t n_rows,
                      const LaneShape& shape, const uint16_t* residency, const LaneSplit& split,
                      LaneWork* w) {
  const uint32_t used = shape.experts_used, n = n_rows * used;
  constexpr uint32_t kNone = ~0u;
  g.For(n, [&](uint32_t i) {
    const uint16_t id = rows[i / used].ids[i % used];
    w->ids[i] = id;
    w->slots[i] = residency[id];
    w->seen[id] = kNone;
  });
  g.For(n, [&](uint32_t i) { g.Min(&w->seen[w->ids[i]], i); });
  const uint32_t n_experts =
      g.Scan(n, [&](uint32_t i) { return w->seen[w->ids[i]] == i; }, w->before);
  g.For(n, [&](uint32_t i) {
    if (w->seen[w->ids[i]] != i) return;
    PlannedExpert& e = w->experts[w->before[i]];
    e.expert = w->ids[i];
    e.slot = w->slots[i];
    e.rows = 0;
    for (uint32_t r = 0; r < kWindowRowsMax; ++r) e.order[r] = 0;
  });
  g.For(n, [&](uint32_t i) {
    PlannedExpert& e = w->OfEntry(i);
    g.Or(&e.rows, RowMask{1} << (i / used));
    e.order[i / used] = static_cast<uint8_t>(i % used);  // a row names no expert twice
  });
  const uint32_t misses = g.Scan(
      n_experts, [&](uint32_t p) { return w->experts[p].slot == kNotResident; }, w->missed);
  const uint32_t pulls = PullsOf(misses, split);
  const uint32_t on_cpu = misses - pulls;
  g.For(n_experts + 1, [&](uint32_t p) {
    if (p == n_experts) {
      w->n_experts = n_experts;
      w->misses = misses;
      w->on_cpu = on_cpu;
      w->n_by_lane[static_cast<uint32_t>(Lane::kHit)] = n_experts - misses;
      w->n_by_lane[static_cast<uint32_t>(Lane::kPull)] = pulls;
      w->n_by_lane[static_cast<uint32_t>(Lane::kCpu)] = on_cpu;
      return;
    }
    PlannedExpert& e = w->experts[p];
    const Lane lane = e.slot != kNotResident    ? Lane::kHit
                      : w->missed[p] < on_cpu ? Lane::kCpu
                                              : Lane::kPull;
    e.lane = static_cast<uint32_t>(lane);
  });
}

// ---- what the device computes
struct DeviceLists {
  ExpertList* list;      // pulls that find no room in the staging area, one entry per node, then hits
  ExpertList* staged;    // the other pulls, computed once their copies are there
  StagedPieces* pieces;  // of the entries of `staged`, in the same order
};
LODE_ANY_GROUP
template <class Group>
LODE_FN void BuildExpertLists(const Group& g, const LaneWork& w, const LaneShape& shape,
                              const LayerPlace& place, const Staging& staging,
                              const DeviceLists& out) {
  const uint32_t pulls = w.n_by_lane[static_cast<uint32_t>(Lane::kPull)];
  const uint32_t staged = pulls < staging.experts ? pulls : staging.experts;
  const uint32_t direct = pulls - staged;
  g.For(w.n_experts + 1, [&](uint32_t p) {
    if (p == w.n_experts) {
      out.list->n_slow = direct * shape.nodes;
      out.list->n_entries = out.list->n_slow + w.n_by_lane[static_cast<uint32_t>(Lane::kHit)];
      out.staged->n_slow = 0;
      out.staged->n_entries = out.pieces->n = staged * shape.nodes;
      return;
    }
    const PlannedExpert& e = w.experts[p];
    ExpertEntry entry;
    entry.rows = e.rows;
    for (uint32_t r = 0; r < kWindowRowsMax; ++r) entry.order[r] = e.order[r];
    if (e.lane == static_cast<uint32_t>(Lane::kHit)) {
      entry.gate = place.slots + uint64_t{e.slot} * place.slot_bytes;
      entry.up = entry.gate + place.up_offset;
      entry.down = entry.gate + place.down_offset;
      entry.width_begin = entry.hidden_begin = 0;
      entry.width_end = shape.width;
      entry.hidden_end = shape.hidden;
      out.list->entries[direct * shape.nodes + p - w.missed[p]] = entry;
    } else if (e.lane == static_cast<uint32_t>(Lane::kPull)) {
      const uint32_t rank = w.missed[p] - w.on_cpu;
      for (uint32_t node = 0; node < shape.nodes; ++node) {
        const NodePlace& from = place.nodes[node];
        const uint32_t at = rank * shape.nodes + node;
        const uint8_t* piece = from.base + e.expert * from.stride;
        entry.gate = rank < staged ? staging.base + at * staging.piece_bytes : piece;
        entry.up = entry.gate + from.up_offset;
        entry.down = entry.gate + from.down_offset;
        entry.width_begin = from.width_begin;
        entry.width_end = from.width_end;
        entry.hidden_begin = from.hidden_begin;
        entry.hidden_end = from.hidden_end;
        if (rank < staged) {
          out.staged->entries[at] = entry;
          out.pieces->pieces[at] = {piece, staging.base + at * staging.piece_bytes,
                                    static_cast<uint32_t>(from.down_offset),
                                    static_cast<uint32_t>(from.stride)};
        } else {
          out.list->entries[at - staged * shape.nodes] = entry;
        }
      }
    }
  });
}

// ---- where every vector of the layer will lie: results[row * used + order]
LODE_ANY_GROUP
template <class Group>
LODE_FN void BuildResultTable(const Group& g, const LaneWork& w, uint32_t n_rows,
                              const LaneShape& shape, const float* device_results,
                              const float* worker_results, const float** table) {
  const uint32_t used = shape.experts_used;
  g.For(n_rows * used, [&](uint32_t i) {
    const float* base = w.OfEntry(i).lane == static_cast<uint32_t>(Lane::kCpu) ? worker_results
                                                                               : device_results;
    table[i] = base + uint64_t{i} * shape.hidden;
  });
}

// ---- the CPU workers' job, made in memory of the block; the tag makes it valid only together with
// the bell. First what is known before the plan, then the rest; a barrier between the two and a
// read is the caller's.
LODE_ANY_GROUP
template <class Group>
LODE_FN void BuildJobHead(const Group& g, const LaneWindow& window, uint32_t layer, uint32_t n_rows,
                          uint32_t act_forms, ExpertJob* job) {
  g.For(kCpuWorkersMax + 1, [&](uint32_t i) {
    if (i < kCpuWorkersMax) {
      job->isa[i] = window.cpu_isa[i];
      return;
    }
    job->tag = JobTag(window.generation, window.window, layer);
    job->layer = layer;
    job->n_rows = n_rows;
    job->act_forms = act_forms;
    job->float_reference = 0;
    job->threads = window.cpu_threads;
  });
}
LODE_ANY_GROUP
template <class Group>
LODE_FN void BuildJobExperts(const Group& g, const LaneWork& w, ExpertJob* job) {
  g.For(w.n_experts + 1, [&](uint32_t p) {
    if (p == w.n_experts) {
      job->n_experts = w.on_cpu;
      return;
    }
    const PlannedExpert& e = w.experts[p];
    if (e.lane != static_cast<uint32_t>(Lane::kCpu)) return;
    JobExpert& out = job->experts[w.missed[p]];
    out.expert = e.expert;
    out.reserved = 0;
    out.rows = e.rows;
    for (uint32_t r = 0; r < kWindowRowsMax; ++r) out.order[r] = e.order[r];
  });
}
// Of a job that names n experts; a multiple of 16.
LODE_FN uint32_t JobBytes(uint32_t n) {
  static_assert(offsetof(ExpertJob, experts) % 16 == 0 && sizeof(JobExpert) % 16 == 0);
  return static_cast<uint32_t>(offsetof(ExpertJob, experts) + n * sizeof(JobExpert));
}

// ---- counts of the layer, for the window's result
LODE_ANY_GROUP
template <class Group>
LODE_FN void AddCounts(const Group& g, const LaneWork& w, uint32_t n_rows, const LaneShape& shape,
                       uint32_t* by_lane, uint32_t (*row_lookups)[kLanes]) {
  const uint32_t used = shape.experts_used;
  g.For(n_rows * used,
        [&](uint32_t i) { g.Add(&row_lookups[i / used][w.OfEntry(i).lane], 1); });
  g.For(kLanes, [&](uint32_t lane) { by_lane[lane] = w.n_by_lane[lane]; });
}

}  // namespace lode::cuda
