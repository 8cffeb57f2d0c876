// daemon -> GPU worker: what one window computes. A POD in the plan ring of the window segment; offsets never pointers.
// The worker copies the slot before it looks at it (no field of a peer is read twice) and checks every index with
// ValidatePlan. Steps 3 and 4 of the life of a token.
#pragma once

#include <cstdint>
#include <type_traits>

#include "shared/base/limits.h"

namespace lode {

enum class RowKind : uint8_t {
  kPrompt = 0,  // token is given, state advances unconditionally
  kDecode = 1,  // the last committed token; its pick is the next token
  kDraft = 2,   // a guess; counts only when the row before picked this token
  kFlush = 3,   // no computation: fold the sequence's accepted rows into its state (before a checkpoint, turn end, cancel)
};

// One token position. Rows of one sequence stand in ascending position order and are adjacent.
struct RowPlan {
  uint32_t seq_index;     // into WindowPlan::seqs
  uint32_t position;      // 0-based position of `token` in its sequence
  int32_t token;
  RowKind kind;
  uint8_t needs_logits;   // 1: run the head for this row
  uint8_t pick;           // 1: sample a token from the logits
  uint8_t top_logprobs;   // 0..kLogprobsMax: how many alternatives to report
  int32_t target;         // >= 0: also report the log probability of this token (teacher forcing); -1: none
  // Lists in the sequence area's heap (SequenceArea::heap), offsets in bytes, counts in entries; count 0 = none.
  uint32_t mask_offset;   // ceil(vocab/32) words, bit set = token allowed; 0xffffffff: no mask
  uint32_t bias_offset, bias_count;        // TokenBias entries
  uint32_t penalty_offset, penalty_count;  // TokenCount entries: committed tokens that penalties count
  int32_t next_token;     // the token at position + 1 when the daemon knows it (the draft head catches up with it);
                          // -1: the row's own pick
};
struct TokenBias { int32_t token; float bias; };
struct TokenCount { int32_t token; uint32_t count; };
inline constexpr uint32_t kNoMask = 0xffffffffu;

// How a row picks: greedy when temperature is 0. The key of the pick is (seed, position of the picked token, stream).
struct SamplingPlan {
  uint64_t seed;
  float temperature;       // >= 0; 0 = greedy
  float top_p;             // (0, 1]; 1 = off
  float min_p;             // [0, 1); 0 = off
  uint32_t top_k;          // 0 = off
  float repetition_penalty, presence_penalty, frequency_penalty;  // 1, 0, 0 = off
  uint32_t stream;         // separates independent draws of one seed; 0 today
};

// One sequence that has rows in this window (or is flushed by it).
struct SequencePlan {
  uint64_t epoch;          // unique per sequence life in a slot: a new epoch makes the worker start from empty state
  uint32_t slot;           // device state slot
  uint32_t committed;      // tokens whose effect on the state is decided: rows at positions < committed are accepted,
                           // all others of earlier windows are rejected and must leave no trace
  uint32_t accepted;       // of the previous window of this sequence: rows that counted (committed grew by this)
  uint32_t block_count;    // valid entries of SequenceArea::kv_blocks
  SamplingPlan sampling;
  // Guesses wanted behind this window, for the next one. They decide nothing.
  uint8_t draft_max;       // 0..kDraftsMax; every one of them has a cell in the sequence's blocks
  uint8_t draft_flags;     // DraftFlags
  uint16_t reserved;
  float draft_min_p;       // [0, 1]: the chain ends before a guess the head is less sure of
};
enum DraftFlags : uint8_t {
  kDraftFollow = 1u << 0,   // the head catches up with this window's accepted rows, so that it may guess now or later
  kDraftCoupled = 1u << 1,  // guesses are drawn with the row's own sampling, lists and key, not taken at the maximum
};

enum WindowFlags : uint32_t {
  kHashLogits = 1u << 0,    // fill RowResult::logits_hash
  kTraceRouting = 1u << 1,  // fill the slot's RoutingTrace
  kCpuLaneDown = 1u << 2,   // a CPU worker is missing: pull every miss
  kTimeStages = 1u << 3,    // fill WindowResult::stage_ns
};

// Tunables that may change at any window border; the worker applies them before the window when `tunables_epoch` is new.
struct Tunables {
  uint64_t epoch;
  uint64_t vram_budget_bytes;  // expert slots; 0 = none (every expert is a miss)
  float pull_share;            // 0..1, policy `fixed`
  uint32_t split_policy;       // SplitPolicy
  uint32_t tier_policy;        // TierPolicy
  uint32_t device_isa;         // index into the kernel tables; cpu device only
  uint32_t cpu_isa[kCpuWorkersMax];  // per CPU worker
  uint32_t cpu_threads;        // active threads of every CPU pool, 0 = all
  uint32_t device_threads;     // active threads of the cpu device, 0 = all
};
enum class SplitPolicy : uint32_t { kFixed = 0, kBalanced = 1 };
enum class TierPolicy : uint32_t { kStatic = 0, kDecayedLfu = 1 };

struct WindowPlan {
  uint64_t window;        // ascending, never reused within a daemon's life; relaunch of an aborted window gets a new number
  uint32_t generation;    // of the GPU worker that may execute it
  uint32_t device;        // 0 today
  uint32_t flags;         // WindowFlags
  uint32_t n_rows;        // 0..kWindowRowsMax; 0 with sequences = flush
  uint32_t n_seqs;        // 0..kWindowRowsMax
  uint32_t reserved;
  RowPlan rows[kWindowRowsMax];
  SequencePlan seqs[kWindowRowsMax];
  Tunables tunables;
};
static_assert(std::is_trivially_copyable_v<WindowPlan> && sizeof(RowPlan) == 44 && sizeof(SequencePlan) == 72);

// Per sequence slot, written by the daemon before the plan that refers to it is published, stable until its result is read.
inline constexpr uint32_t kSequenceHeapBytes = 256 * 1024;  // mask of 1 M tokens (128 KiB) + bias and penalty lists
struct SequenceArea {
  uint32_t kv_blocks[kKvBlocksPerSequenceMax];  // block ids in position order
  uint8_t heap[kSequenceHeapBytes];
};

}  // namespace lode
