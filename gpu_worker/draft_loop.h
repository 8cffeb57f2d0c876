// Guessing behind a window: once its rows are picked, the draft head catches up with the rows that
// hold, and chains guesses for the sequences that want some. One pass serves all sequences of the
// window; the first pass is the catching up, and its last row of a sequence gives that sequence's
// first guess; each further pass is one more depth of every chain still alive. Behind step 9 of the
// life of a token.
//
// What can go wrong here costs guesses only: a sequence whose cells have a hole (it was served
// without kDraftFollow for a while) gets no guesses in this epoch, and neither does a window whose
// pass met a value that is not finite. Rows that the daemon rejects although they were proposed leave
// cells that the next window's rows overwrite. Thread: the worker loop's; picks use `pool`.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu_worker/draft_engine.h"
#include "gpu_worker/host_pool.h"
#include "gpu_worker/plan_check.h"
#include "gpu_worker/sampler.h"
#include "shared/wire/window_plan.h"
#include "shared/wire/window_result.h"

namespace lode {

class DraftLoop {
 public:
  // `slots`: of sequences on the device; `context`: tokens of the longest one. References outlive
  // this.
  DraftLoop(uint32_t vocab, uint32_t slots, uint32_t context, DraftEngine& drafter,
            HostPool& pool);

  // The window of `plan` ended well and `result` holds its picks and proposed accepts. `params`,
  // `row_of`: as SequenceState::Stage made them; `wide`: Forward::wide(). Fills n_drafts, drafts,
  // draft_p, draft_ns and draft_passes.
  void Run(const WindowPlan& plan, const StepParams& params, const uint32_t* row_of,
           const float* wide, const PlanAreas& areas, WindowResult* result);

 private:
  struct Slot {
    uint64_t epoch = 0;
    uint32_t end = 0;  // cells below are filled
  };
  // A sequence of the window whose chain is alive.
  struct Chain {
    uint32_t seq;       // of the plan
    uint32_t row;       // of the last pass: where its residual and logits are
    uint32_t position;  // of that row; its guess stands two behind
    uint32_t plan_row;  // the last row that holds: lists of the sampler
    uint32_t wanted;    // guesses, at least 1
    // Tokens behind the plan's committed ones: the drafts that held, the pick, the guesses so far.
    uint32_t n_tail;
    int32_t tail[2 * kWindowRowsMax];
  };
  using Guess = DraftGuess;

  void CollectRows(const WindowPlan& plan, const StepParams& params, const uint32_t* row_of,
                   const WindowResult& result, StepParams* pass);
  void AddSequence(const WindowPlan& plan, const StepSequence& staged, uint32_t seq,
                   const uint32_t* row_of, const WindowResult& result, StepParams* pass);
  bool DeviceCanRun(const WindowPlan& plan) const;
  void RunOnDevice(const WindowPlan& plan, const StepParams& first, const float* wide,
                   WindowResult* result);
  void TakeGuesses(const WindowPlan& plan, const PlanAreas& areas, WindowResult* result);
  Guess GuessOf(const WindowPlan& plan, const Chain& chain, const PlanAreas& areas,
                uint32_t scratch);
  void NextPass(const StepParams& params, const WindowResult& result, StepParams* pass);
  void Forget(const WindowPlan& plan);

  const uint32_t context_;
  DraftEngine& drafter_;
  HostPool& pool_;
  std::vector<Slot> slots_;
  std::vector<SamplerScratch> scratch_;           // [chain]
  std::vector<std::vector<float>> full_logits_;   // [chain][vocab], for a reduced vocabulary
  Chain chains_[kWindowRowsMax];
  Guess guesses_[kWindowRowsMax];
  uint32_t n_chains_ = 0;
};

}  // namespace lode
