// What guessing needs of a device: passes of the draft head, one at a time with the host picking
// between them, or, where the device can pick for itself, a whole run of passes. Two
// implementations: drafter.h (cpu device) and cuda_drafter.h. Behind step 9 of the life of a token.
// Thread: the worker loop's.
#pragma once

#include <cstdint>
#include <span>

#include "gpu_worker/expert_lanes.h"
#include "gpu_worker/step_params.h"

namespace lode {

// A chain of greedy guesses that hangs on a row of the first pass.
struct DraftChain {
  uint32_t row;     // of the first pass, with needs_logits; its guess stands two positions behind
  uint32_t wanted;  // guesses, at least 1; later passes stand at the positions behind the row
  float min_p;      // the chain's owner drops guesses from the first one below this on
};
struct DraftGuess {
  int32_t token;
  float p;  // the head's probability of it
};

class DraftEngine {
 public:
  virtual ~DraftEngine() = default;

  // ---- a pass: see Drafter::Step. `residual`: Forward::wide() or wide().
  virtual WindowOutcome Step(const StepParams& params, const float* residual) = 0;
  // Of the last step. wide: device memory; logits: host-readable, [logits_size()].
  virtual const float* wide() const = 0;
  virtual const float* logits(uint32_t row) const = 0;
  // Token ids that logits stand for, ascending; empty: every token.
  virtual std::span<const int32_t> vocabulary() const = 0;
  virtual uint32_t logits_size() const = 0;

  // ---- a run of passes
  virtual bool runs_chains() const { return false; }
  // The first pass and as many as the chains want, the device choosing the likeliest token each
  // time. `chains`: by falling `wanted`. Fills guesses[chain][0..], n_guesses[chain] (at most
  // wanted, maybe fewer where min_p ended a chain; the last may be below min_p) and n_passes. Bits
  // of tokens and probabilities are those of Step with ArgmaxLogit and Normalize. When a pass met a
  // value that is not finite the outcome says so and guesses of passes before it count.
  virtual WindowOutcome RunChains(const StepParams& /*first*/, const float* /*residual*/,
                                  std::span<const DraftChain> /*chains*/,
                                  DraftGuess (* /*guesses*/)[kDraftsMax], uint32_t* /*n_guesses*/,
                                  uint32_t* /*n_passes*/) {
    return {};
  }
};

}  // namespace lode
