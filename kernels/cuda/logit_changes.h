// What changes a row's logits before the pick: biases, a mask, penalties, in the order and the
// arithmetic of gpu_worker/sampler.cc. Device code, part of the first kernel of sampling.cu: all
// blocks of a row's grid line take part, each for the tokens that it has.
#pragma once

#include "gpu_worker/row_pick.h"
#include "gpu_worker/sampler_math.h"
#include "kernels/cuda/platform.h"
#include "shared/wire/window_plan.h"

namespace lode::cuda {

struct LogitChange {
  const float* logits;   // [vocab], the model's own
  float* changed;        // [vocab], what comes out
  uint32_t* counts;      // [vocab], scratch: how often penalties count a token
  const uint8_t* lists;  // what RowWants' places count from
  uint32_t vocab;
};

// A thread has the tokens that it has in every loop over the vocabulary, so what it
// wrote itself needs no barrier; a block has those of its threads.
LODE_DEVICE bool InBlock(uint32_t id) { return id / ThreadCount() % GridX() == BlockX(); }
LODE_DEVICE bool InThread(uint32_t id) { return InBlock(id) && id % ThreadCount() == ThreadId(); }
LODE_DEVICE bool Allowed(const LogitChange& c, const RowWants& wants, uint32_t id) {
  if (wants.mask == kNoChange) return true;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(c.lists + wants.mask);
  return (words[id / 32] >> id % 32 & 1) != 0;
}

// Repetition, presence and frequency penalty of each counted token, once, whatever list names it
// how often: its counter is taken and put back to zero.
LODE_DEVICE void Punish(const LogitChange& c, const RowWants& wants, uint32_t id) {
  if (!InBlock(id)) return;
  const uint32_t n = AtomicExchange(&c.counts[id], 0);
  if (n == 0) return;
  float l = c.changed[id];
  l = l > 0 ? canonical::Div(l, wants.repetition_penalty)
            : canonical::Mul(l, wants.repetition_penalty);
  l = canonical::Sub(l, wants.presence_penalty);
  const float count = static_cast<float>(n);
  // Infinite penalties of infinite logits are no number; the host's sampler passes those over.
  c.changed[id] = CleanLogit(canonical::Sub(l, canonical::Mul(wants.frequency_penalty, count)));
}
LODE_DEVICE void ApplyPenalties(const LogitChange& c, const RowWants& wants) {
  const TokenCount* counts = reinterpret_cast<const TokenCount*>(c.lists + wants.counts);
  const int32_t* drafts = reinterpret_cast<const int32_t*>(c.lists + wants.drafts);
  SyncBlock();  // counters are zero, the block's changed logits complete
  for (uint32_t i = ThreadId(); i < wants.n_counts; i += ThreadCount()) {
    const TokenCount t = counts[i];
    if (InBlock(t.token)) AtomicAdd(&c.counts[t.token], t.count);
  }
  if (ThreadId() < wants.n_drafts && InBlock(drafts[ThreadId()]))
    AtomicAdd(&c.counts[drafts[ThreadId()]], 1);
  SyncBlock();
  for (uint32_t i = ThreadId(); i < wants.n_counts; i += ThreadCount())
    Punish(c, wants, counts[i].token);
  if (ThreadId() < wants.n_drafts) Punish(c, wants, drafts[ThreadId()]);
  SyncBlock();
}

// The block's part of the changed logits, in the sampler's order: bias, mask, penalties. Returns
// the thread's best allowed token.
LODE_DEVICE uint64_t ChangeLogits(const LogitChange& c, const RowWants& wants) {
  const uint32_t first = BlockX() * ThreadCount() + ThreadId(), step = GridX() * ThreadCount();
  const bool penalises = wants.n_counts + wants.n_drafts > 0;
  for (uint32_t i = first; i < c.vocab; i += step) {
    c.changed[i] = CleanLogit(c.logits[i]);
    if (penalises) c.counts[i] = 0;
  }
  // In the list's order, should it name a token twice.
  const TokenBias* bias = reinterpret_cast<const TokenBias*>(c.lists + wants.bias);
  for (uint32_t j = 0; j < wants.n_bias; ++j) {
    const TokenBias b = bias[j];
    if (InThread(b.token))
      c.changed[b.token] = CleanLogit(canonical::Add(c.changed[b.token], b.bias));
  }
  for (uint32_t i = first; i < c.vocab; i += step) {
    if (!Allowed(c, wants, i)) c.changed[i] = canonical::FromBits(0xff800000u);
  }
  if (penalises) ApplyPenalties(c, wants);
  uint64_t best = 0;
  for (uint32_t i = first; i < c.vocab; i += step) {
    const uint64_t key = Allowed(c, wants, i) ? KeyOf(c.changed[i], i) : 0;
    best = key > best ? key : best;
  }
  return best;
}

}  // namespace lode::cuda
