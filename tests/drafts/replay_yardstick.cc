// See replay_yardstick.h.
#include "tests/drafts/replay_yardstick.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "daemon/draft_planner.h"
#include "daemon/request.h"
#include "shared/base/check.h"

namespace lode {
namespace {

// A place before which no window of an answer starts: the prompt's window gives the first token.
constexpr uint32_t kFirstPlace = 1;

double Median(std::vector<double> values) {
  LODE_CHECK(!values.empty(), "a median of nothing");
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// e to the mean of the middle half of `logs`: a window that lost its core says nothing, and normal
// noise moves it hardly more than a mean (by 1.09 standard deviations over the root of their
// number). The deviation from the median deviation (1.48 of it).
Yardstick::Ratio Middle(std::vector<double> logs) {
  constexpr double kMiddleError = 1.09, kDeviation = 1.48;
  if (logs.empty()) return {0, 1};
  std::sort(logs.begin(), logs.end());
  const size_t cut = logs.size() / 4;
  double sum = 0;
  for (size_t i = cut; i < logs.size() - cut; ++i) sum += logs[i];
  const double middle = sum / static_cast<double>(logs.size() - 2 * cut);
  std::vector<double> off;
  for (const double v : logs) off.push_back(std::fabs(v - middle));
  const double error =
      kMiddleError * kDeviation * Median(off) / std::sqrt(static_cast<double>(logs.size()));
  return {std::exp(middle), logs.size() > 1 ? error : 1};
}

}  // namespace

ReplayPattern::ReplayPattern(double right, uint32_t tokens) : right_run_(tokens + 1, 0) {
  ReplayDrafts replay;
  replay.right = right;
  for (uint32_t at = tokens; at-- > 0;)
    right_run_[at] = ReplayIsRight(replay, at) ? right_run_[at + 1] + 1 : 0;
  const uint32_t end = tokens - kDraftsMax;  // a window that starts behind it has fewer drafts
  for (uint32_t n = 0; n < kWindowRowsMax; ++n) {
    uint64_t given = 0;
    for (uint32_t at = kFirstPlace; at < end; ++at) given += 1 + Held(at, n);
    tokens_[n] = static_cast<double>(given) / (end - kFirstPlace);
  }
}

uint32_t ReplayPattern::Held(uint32_t at, uint32_t n) const {
  return std::min(n, right_run_[std::min<size_t>(at, right_run_.size() - 1)]);
}

RoundsPlan PlanRounds(const ReplayPattern& pattern, const std::vector<uint32_t>& contenders,
                      uint32_t first_round, uint32_t rounds) {
  RoundsPlan plan;
  uint32_t at = kFirstPlace;
  const auto all = static_cast<uint32_t>(contenders.size());
  for (uint32_t round = first_round; round < first_round + rounds; ++round) {
    // Every second round backwards, so that what drifts evenly meets all alike.
    for (uint32_t i = 0; i < all; ++i) {
      const uint32_t turn = (round / 2 + i) % all;
      const uint32_t n = contenders[round % 2 == 0 ? turn : (2 * all - 1 + round / 2 - i) % all];
      for (uint32_t w = 0; w < kBlockWindows; ++w) {
        plan.drafts.push_back(static_cast<uint8_t>(n));
        plan.tokens.push_back(1 + pattern.Held(at, n));
        at += plan.tokens.back();
      }
    }
  }
  plan.answer_tokens = at;
  return plan;
}

void Yardstick::Add(const RoundsPlan& plan, const std::vector<double>& ns) {
  LODE_CHECK(ns.size() >= plan.drafts.size(), "{} windows were timed, {} planned", ns.size(),
             plan.drafts.size());
  Round* round = nullptr;
  for (size_t w = 0; w < plan.drafts.size(); w += kBlockWindows) {
    const uint32_t n = plan.drafts[w];
    if (round == nullptr || (*round)[n][0] > 0) round = &rounds_.emplace_back();
    std::copy_n(ns.begin() + w, kBlockWindows, (*round)[n].begin());
  }
}

uint32_t Yardstick::Timed(uint32_t n) const {
  return static_cast<uint32_t>(std::count_if(rounds_.begin(), rounds_.end(),
                                             [n](const Round& round) { return round[n][0] > 0; }));
}

Yardstick::Ratio Yardstick::Speed(uint32_t n, uint32_t base) const {
  if (n == base) return {1, 0};
  std::vector<double> logs;
  for (const Round& round : rounds_) {
    if (round[n][0] == 0 || round[base][0] == 0) continue;
    for (uint32_t w = 1; w < kBlockWindows; ++w)
      logs.push_back(std::log(round[base][w] / round[n][w]));
  }
  Ratio ratio = Middle(std::move(logs));
  ratio.value *= pattern_.Tokens(n) / pattern_.Tokens(base);
  return ratio;
}

uint32_t Yardstick::Fastest() const {
  uint32_t base = 0;
  for (uint32_t n = 1; n < kWindowRowsMax; ++n) base = Timed(n) > Timed(base) ? n : base;
  uint32_t best = base;
  double most = 1;
  for (uint32_t n = 0; n < kWindowRowsMax; ++n) {
    const double speed = Timed(n) == Timed(base) ? Speed(n, base).value : 0;
    if (speed <= most) continue;
    most = speed;
    best = n;
  }
  return best;
}

std::vector<uint32_t> Yardstick::Contenders(double share, uint32_t also) const {
  const uint32_t best = Fastest();
  std::vector<uint32_t> contenders;
  for (uint32_t n = 0; n < kWindowRowsMax; ++n) {
    const Ratio speed = Speed(n, best);
    if (n == also || speed.value + speed.noise >= share) contenders.push_back(n);
  }
  return contenders;
}

double Yardstick::WindowNs(uint32_t n) const {
  std::vector<double> all;
  for (const Round& round : rounds_) {
    if (round[n][0] > 0) all.insert(all.end(), round[n].begin() + 1, round[n].end());
  }
  return all.empty() ? 0 : Median(std::move(all));
}

Yardstick::Ratio Yardstick::FirstOfBlock() const {
  std::vector<double> logs;
  for (const Round& round : rounds_) {
    for (const auto& block : round) {
      if (block[0] > 0) logs.push_back(std::log(block[0] / block[1]));
    }
  }
  return Middle(std::move(logs));
}

}  // namespace lode
