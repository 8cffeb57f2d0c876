// One hash per kind of segment over the size and the field offsets of every struct that two
// processes read in it, and over the bounds that size its arrays. The creator stores it in the
// segment's header, everybody who attaches compares: two builds that disagree about one byte refuse
// each other instead of misreading. A new cross-process field is added to its list here.
#pragma once

#include <cstddef>

#include "shared/shm/segment.h"
#include "shared/wire/arena_layout.h"
#include "shared/wire/exchange_layout.h"
#include "shared/wire/window_segment.h"

namespace lode {

inline constexpr uint64_t kExchangeLayoutHash = LayoutHash({
    sizeof(WaitWord),
    offsetof(WaitWord, value),
    offsetof(WaitWord, futex),
    offsetof(WaitWord, sleepers),
    sizeof(JobExpert),
    offsetof(JobExpert, expert),
    offsetof(JobExpert, rows),
    offsetof(JobExpert, order),
    sizeof(ExpertJob),
    offsetof(ExpertJob, tag),
    offsetof(ExpertJob, layer),
    offsetof(ExpertJob, n_rows),
    offsetof(ExpertJob, n_experts),
    offsetof(ExpertJob, act_forms),
    offsetof(ExpertJob, float_reference),
    offsetof(ExpertJob, isa),
    offsetof(ExpertJob, threads),
    offsetof(ExpertJob, experts),
    sizeof(WorkerLine),
    offsetof(WorkerLine, ack),
    offsetof(WorkerLine, status),
    offsetof(WorkerLine, error_row),
    offsetof(WorkerLine, progress),
    offsetof(WorkerLine, busy_ns),
    offsetof(WorkerLine, bytes),
    offsetof(WorkerLine, generation),
    offsetof(WorkerLine, ready),
    sizeof(ExchangeHeader),
    offsetof(ExchangeHeader, shape),
    offsetof(ExchangeHeader, device),
    offsetof(ExchangeHeader, bell),
    offsetof(ExchangeHeader, window_epoch),
    offsetof(ExchangeHeader, abort_window),
    offsetof(ExchangeHeader, gpu_heartbeat),
    offsetof(ExchangeHeader, workers),
    offsetof(ExchangeHeader, hidden_ready),
    offsetof(ExchangeHeader, jobs),
    kWindowRowsMax,
    kJobExpertsMax,
    kCpuWorkersMax,
    ExchangeLayout{{4096, 640, 10, 2}}.bytes(),  // the offsets behind the header, at one shape
    kFormatCount,                                // kernel tables and formats travel as indexes
});

inline constexpr uint64_t kArenaLayoutHash = LayoutHash({
    sizeof(ArenaHeader),
    offsetof(ArenaHeader, layout_hash),
    offsetof(ArenaHeader, identity),
    offsetof(ArenaHeader, arithmetic_version),
    offsetof(ArenaHeader, node),
    offsetof(ArenaHeader, n_nodes),
    offsetof(ArenaHeader, layers),
    offsetof(ArenaHeader, experts),
    offsetof(ArenaHeader, bytes),
    offsetof(ArenaHeader, experts_complete),
    sizeof(ArenaExpert),
    offsetof(ArenaExpert, complete),
    offsetof(ArenaExpert, hash),
    kArenaAlign,
});

inline constexpr uint64_t kWindowLayoutHash = LayoutHash({
    sizeof(RowPlan),
    offsetof(RowPlan, token),
    offsetof(RowPlan, kind),
    offsetof(RowPlan, target),
    offsetof(RowPlan, mask_offset),
    offsetof(RowPlan, bias_offset),
    offsetof(RowPlan, penalty_offset),
    offsetof(RowPlan, next_token),
    sizeof(SamplingPlan),
    offsetof(SamplingPlan, temperature),
    offsetof(SamplingPlan, top_k),
    offsetof(SamplingPlan, repetition_penalty),
    offsetof(SamplingPlan, stream),
    sizeof(SequencePlan),
    offsetof(SequencePlan, slot),
    offsetof(SequencePlan, committed),
    offsetof(SequencePlan, sampling),
    offsetof(SequencePlan, draft_max),
    offsetof(SequencePlan, draft_flags),
    offsetof(SequencePlan, draft_min_p),
    sizeof(Tunables),
    offsetof(Tunables, vram_budget_bytes),
    offsetof(Tunables, pull_share),
    offsetof(Tunables, cpu_isa),
    offsetof(Tunables, cpu_threads),
    offsetof(Tunables, device_threads),
    sizeof(WindowPlan),
    offsetof(WindowPlan, rows),
    offsetof(WindowPlan, seqs),
    offsetof(WindowPlan, tunables),
    sizeof(RowResult),
    offsetof(RowResult, logits_hash),
    offsetof(RowResult, top),
    sizeof(WindowResult),
    offsetof(WindowResult, error),
    offsetof(WindowResult, rows),
    offsetof(WindowResult, proposed_accepts),
    offsetof(WindowResult, drafts),
    offsetof(WindowResult, draft_p),
    offsetof(WindowResult, lookups),
    offsetof(WindowResult, layer_lookups),
    offsetof(WindowResult, draft_ns),
    offsetof(WindowResult, stage_ns),
    offsetof(WindowResult, resident_experts),
    sizeof(RoutingTrace),
    sizeof(SequenceArea),
    offsetof(SequenceArea, heap),
    sizeof(WindowSegment),
    offsetof(WindowSegment, generation),
    offsetof(WindowSegment, pulse),
    offsetof(WindowSegment, plans),
    offsetof(WindowSegment, results),
    offsetof(WindowSegment, traces),
    offsetof(WindowSegment, sequences),
    kWindowRingSlots,
    kSequenceSlotsMax,
    kStages,
});

}  // namespace lode
