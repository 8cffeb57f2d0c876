// A window plan is checked before anything of it is used: every index, range, offset and order. The
// worker trusts nothing that it reads from shared memory: it copies the plan (the ring does), then
// each list of the sequence areas once, checks the copies and works on them only. Step 4. Called by
// the worker loop; no allocation.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "shared/wire/window_plan.h"

namespace lode {

// Why a plan was refused (WindowError::detail of kBadPlan); WindowError::row holds the row or
// sequence at fault.
#define LODE_PLAN_ERRORS(X)                                                      \
  X(None, "")                                                                    \
  X(Generation, "made for another worker generation or device")                  \
  X(Counts, "more rows, sequences or flags than a window has")                   \
  X(Tunables, "a tunable is out of range")                                       \
  X(Slot, "sequence slot out of range or used twice")                            \
  X(Committed, "committed or accepted tokens out of range")                      \
  X(Blocks, "a KV block is out of range, or there are more than a sequence has") \
  X(Sampling, "a sampling number is out of range")                               \
  X(RowOrder, "rows of a sequence are not adjacent, ascending, or misnumbered")  \
  X(Position, "a position is outside the context or its sequence's KV blocks")   \
  X(Token, "a token is outside the vocabulary")                                  \
  X(Kind, "a row kind is unknown or stands in a wrong place")                    \
  X(Drafts, "more drafts than a window holds, or a drafting number is out of range")         \
  X(Outputs, "more log probabilities than allowed, or a pick without logits")    \
  X(HeapRange, "a list leaves the sequence's heap")                              \
  X(ListEntry, "a list entry is outside the vocabulary or no number")            \
  X(History, "commits or positions do not fit what the slot has computed")

enum class PlanError : uint32_t {
#define LODE_X(name, text) k##name,
  LODE_PLAN_ERRORS(LODE_X)
#undef LODE_X
};
const char* PlanErrorText(PlanError error);

struct PlanLimits {
  uint32_t generation, device;
  uint32_t vocab;
  uint32_t context;         // tokens
  uint32_t kv_blocks;       // ids are below this
  uint32_t sequence_slots;  // <= kSequenceSlotsMax
};

// The worker's own copy of what a plan refers to; one for the process's life (2 MiB).
struct PlanAreas {
  SequenceArea
      seqs[kWindowRowsMax];  // by WindowPlan::seqs index; only what the plan refers to is copied
  // Lists of a row, inside its sequence's copy. REQUIRES: ValidatePlan accepted `plan`.
  const uint32_t* Mask(const RowPlan& row) const;  // nullptr: none
  std::span<const TokenBias> Bias(const RowPlan& row) const;
  std::span<const TokenCount> Penalties(const RowPlan& row) const;
};

struct PlanVerdict {
  PlanError error = PlanError::kNone;
  uint32_t where = 0;  // row or sequence
  bool ok() const { return error == PlanError::kNone; }
};
// `areas`: WindowSegment::sequences, read once. On success `copy` holds every list that the plan
// names.
PlanVerdict ValidatePlan(const WindowPlan& plan, const PlanLimits& limits,
                         const SequenceArea* areas, PlanAreas* copy);

}  // namespace lode
