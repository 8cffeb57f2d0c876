// The pick of a row. Cuts (top-k, top-p) are found by one radix descent over 64-bit keys that hold
// (logit, id) in falling order: it needs sums only, never a sorted vocabulary, and gives the same
// set on every device.
#define XXH_INLINE_ALL
#include "gpu_worker/sampler.h"

#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "kernels/canonical.h"
#include "shared/base/check.h"

namespace lode {
namespace {

using canonical::Add;
using canonical::Div;
using canonical::Exp;
using canonical::FromBits;
using canonical::Mul;
using canonical::Sub;

using Candidate = SamplerCandidate;

const float kNegInf = FromBits(0xff800000u);

// The key at which the weights, summed from the largest key downwards, first reach `target` (>= 1,
// <= their sum). Eight bits of the key per step: histogram, walk down, go on inside the bucket
// where the sum crosses.
template <class Weight>
uint64_t CutKey(std::span<const Candidate> candidates, uint64_t target, Weight weight) {
  uint64_t prefix = 0, mask = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    uint64_t sums[256] = {};
    for (const Candidate& c : candidates) {
      if ((c.key & mask) == prefix) sums[(c.key >> shift) & 0xff] += weight(c);
    }
    int bucket = 255;
    while (bucket > 0 && sums[bucket] < target) target -= sums[bucket--];
    prefix |= static_cast<uint64_t>(bucket) << shift;
    mask |= uint64_t{0xff} << shift;
  }
  return prefix;
}

void ApplyPenalties(const PickInput& in, std::vector<uint32_t>* counts,
                    std::vector<float>* logits) {
  const SamplingPlan& s = *in.sampling;
  const bool on =
      s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f;
  if (!on) return;
  for (const TokenCount& c : in.counts) (*counts)[c.token] += c.count;
  for (const int32_t token : in.draft_tokens) (*counts)[token] += 1;
  // Each token once, whatever list names it: its counter is taken and put back to zero.
  const auto punish = [&](int32_t token) {
    const uint32_t n = std::exchange((*counts)[token], 0u);
    if (n == 0) return;
    float l = (*logits)[token];
    l = l > 0 ? Div(l, s.repetition_penalty) : Mul(l, s.repetition_penalty);
    l = Sub(l, s.presence_penalty);
    (*logits)[token] = Sub(l, Mul(s.frequency_penalty, static_cast<float>(n)));
  };
  for (const TokenCount& c : in.counts) punish(c.token);
  for (const int32_t token : in.draft_tokens) punish(token);
}

bool Allowed(const uint32_t* mask, uint32_t id) {
  return mask == nullptr || (mask[id / 32] >> (id % 32)) & 1;
}

// When no finite logit is left: the lowest id that the mask allows, else 0.
int32_t LowestAllowed(const PickInput& in) {
  for (uint32_t id = 0; id < in.logits.size(); ++id) {
    if (Allowed(in.mask, id)) return static_cast<int32_t>(id);
  }
  return 0;
}

// Highest value, lowest id; -1 when nothing is above -inf.
int32_t Best(std::span<const float> logits) {
  const float max = GetSamplerMath().max_of(logits.data(), logits.size());
  if (max == kNegInf) return -1;
  return static_cast<int32_t>(std::find(logits.begin(), logits.end(), max) - logits.begin());
}

// The draw: argmax of x + Gumbel. A token can win only if its Gumbel variate exceeds t = best - x,
// that is, if 1 - u < exp(-t) for its uniform u. That test costs a Philox and a compare; the margin
// of 1 % covers every rounding of both sides many times, so the full variate is computed for the
// few tokens that might win and the result is the plain argmax, bit for bit.
constexpr float kGumbelMargin = 1.01f;

int32_t GumbelDraw(std::span<const Candidate> candidates, const PickInput& in) {
  const SamplingPlan& s = *in.sampling;
  float best_value = kNegInf, reach = 0;
  uint32_t best = IdOfKey(candidates[0].key);
  bool any = false;
  for (const Candidate& c : candidates) {
    const uint32_t id = IdOfKey(c.key);
    if (any) {
      // Weights are rounded to units: one more keeps the bound an upper one.
      const float p =
          Mul(static_cast<float>(static_cast<int64_t>(c.weight + 1)), 1.0f / kWeightOne);
      const uint32_t bits =
          canonical::Philox(s.seed, (static_cast<uint64_t>(in.position) << 32) | id, s.stream).v[0];
      if (Sub(1.0f, canonical::UniformOpen(bits)) > Mul(p, reach)) continue;
    }
    const float value =
        Add(ValueOfKey(c.key), canonical::Gumbel(s.seed, in.position, id, s.stream));
    if (any && !(value > best_value || (value == best_value && id < best))) continue;
    any = true;
    best_value = value;
    best = id;
    reach = Mul(Exp(-best_value), kGumbelMargin);
  }
  return static_cast<int32_t>(best);
}

size_t KeepFrom(std::span<Candidate> candidates, uint64_t cut) {
  const auto end = std::remove_if(candidates.begin(), candidates.end(),
                                  [&](const Candidate& c) { return c.key < cut; });
  return static_cast<size_t>(end - candidates.begin());
}

}  // namespace

SamplerScratch::SamplerScratch(uint32_t vocab)
    : logits_(vocab), counts_(vocab, 0), candidates_(vocab) {}

int32_t PickToken(const PickInput& in, SamplerScratch* scratch) {
  const uint32_t vocab = static_cast<uint32_t>(in.logits.size());
  LODE_CHECK(vocab > 0 && vocab <= scratch->logits_.size(), "{} logits in a scratch of {}", vocab,
             scratch->logits_.size());
  const SamplingPlan& s = *in.sampling;
  std::vector<float>& logits = scratch->logits_;

  // 1. bias, mask, penalties
  for (uint32_t id = 0; id < vocab; ++id) logits[id] = CleanLogit(in.logits[id]);
  for (const TokenBias& b : in.bias) logits[b.token] = CleanLogit(Add(logits[b.token], b.bias));
  if (in.mask != nullptr) {
    for (uint32_t id = 0; id < vocab; ++id)
      logits[id] = Allowed(in.mask, id) ? logits[id] : kNegInf;
  }
  ApplyPenalties(in, &scratch->counts_, &logits);

  // 2. greedy
  const std::span<const float> processed(logits.data(), vocab);
  const int32_t best = Best(processed);
  if (best < 0) return LowestAllowed(in);
  if (s.temperature == 0.0f) return best;

  // 3. temperature, relative to the best logit
  const float max = logits[best];
  size_t n = 0;
  for (uint32_t id = 0; id < vocab; ++id) {
    const float x = ScaledLogit(logits[id], max, s.temperature);
    if (x > kNegInf) scratch->candidates_[n++].key = KeyOf(x, id);
  }
  const auto alive = [&] { return std::span<Candidate>(scratch->candidates_.data(), n); };

  // 4. top-k, top-p, min-p
  if (s.top_k > 0 && s.top_k < n) {
    n = KeepFrom(alive(), CutKey(alive(), s.top_k, [](const Candidate&) { return uint64_t{1}; }));
  }
  uint64_t total = 0;
  GetSamplerMath().fill_weights(scratch->candidates_.data(), n);
  for (const Candidate& c : alive()) total += c.weight;
  if (s.top_p < 1.0f) {
    n = KeepFrom(alive(), CutKey(alive(), TopPTarget(s.top_p, total),
                                 [](const Candidate& c) { return c.weight; }));
  }
  if (s.min_p > 0.0f) {
    const uint64_t floor = MinPFloor(s.min_p);
    const auto end = std::remove_if(alive().begin(), alive().end(),
                                    [&](const Candidate& c) { return c.weight < floor; });
    n = static_cast<size_t>(end - alive().begin());
  }

  // 5. the draw
  return GumbelDraw(alive(), in);
}

int32_t ArgmaxLogit(std::span<const float> logits) { return std::max(Best(logits), 0); }

float LogNormalizer::LogProb(float logit) const {
  return Sub(Sub(CleanLogit(logit), max), log_sum);
}

LogNormalizer NormalizerOf(float max, float sum) { return {max, canonical::Log(sum)}; }

LogNormalizer Normalize(std::span<const float> logits) {
  return Normalize(logits, ArgmaxLogit(logits));
}

LogNormalizer Normalize(std::span<const float> logits, int32_t argmax) {
  const float max = CleanLogit(logits[static_cast<size_t>(argmax)]);
  float partials[canonical::kPartials] = {};
  GetSamplerMath().add_exp(logits.data(), logits.size(), max, partials);
  return NormalizerOf(max, canonical::JoinPartials(partials));
}

void TopTokens(std::span<const float> logits, uint32_t n, SamplerScratch* scratch,
               TopLogprob* top) {
  n = std::min<uint32_t>(n, static_cast<uint32_t>(logits.size()));
  const LogNormalizer norm = Normalize(logits);
  for (uint32_t id = 0; id < logits.size(); ++id)
    scratch->candidates_[id].key = KeyOf(CleanLogit(logits[id]), id);
  const auto end = scratch->candidates_.begin() + static_cast<ptrdiff_t>(logits.size());
  std::partial_sort(scratch->candidates_.begin(), scratch->candidates_.begin() + n, end,
                    [](const Candidate& a, const Candidate& b) { return a.key > b.key; });
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t id = IdOfKey(scratch->candidates_[i].key);
    top[i] = {static_cast<int32_t>(id), norm.LogProb(logits[id])};
  }
}

uint64_t HashLogits(std::span<const float> logits) {
  return XXH3_64bits(logits.data(), logits.size_bytes());
}

}  // namespace lode
