// Rankings, placement and the decayed_lfu policy. Everything is decided by total orders, so equal
// inputs give equal outputs on every machine; none of it can change a bit of an answer, only where
// weights are read from.
#include "gpu_worker/tier_policy.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <tuple>

#include "shared/base/check.h"

namespace lode {
namespace {

// The next field of a line: characters up to a blank or tab.
std::string_view TakeField(std::string_view* line) {
  const size_t begin = line->find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) {
    *line = {};
    return {};
  }
  size_t end = line->find_first_of(" \t\r", begin);
  if (end == std::string_view::npos) end = line->size();
  const std::string_view field = line->substr(begin, end - begin);
  line->remove_prefix(end);
  return field;
}

template <class T>
bool ParseWhole(std::string_view field, T* out) {
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), *out);
  return error == std::errc() && end == field.data() + field.size();
}

// One line; *used = false for blank and comment lines.
Status ParseLine(std::string_view line, size_t number, uint32_t layers, uint32_t experts,
                 RankedExpert* out, bool* used) {
  if (const size_t hash = line.find('#'); hash != std::string_view::npos)
    line = line.substr(0, hash);
  const std::string_view layer_text = TakeField(&line);
  *used = !layer_text.empty();
  if (!*used) return OkStatus();
  const std::string_view expert_text = TakeField(&line);
  const std::string_view score_text = TakeField(&line);
  uint32_t layer = 0, expert = 0;
  float score = 0;
  if (!ParseWhole(layer_text, &layer) || !ParseWhole(expert_text, &expert) ||
      !ParseWhole(score_text, &score) || !TakeField(&line).empty()) {
    return InvalidArgument("profile line {}: expected \"layer expert score\"", number);
  }
  if (layer >= layers || expert >= experts) {
    return InvalidArgument(
        "profile line {}: layer {} expert {} is outside the model's {} layers of {} experts",
        number, layer, expert, layers, experts);
  }
  if (!std::isfinite(score) || score < 0) {
    return InvalidArgument("profile line {}: the score must be a finite number, 0 or more", number);
  }
  *out = {{static_cast<uint16_t>(layer), static_cast<uint16_t>(expert)}, score};
  return OkStatus();
}

}  // namespace

StatusOr<std::vector<RankedExpert>> ParseRanking(std::string_view text, uint32_t layers,
                                                 uint32_t experts) {
  std::vector<RankedExpert> ranking;
  std::vector<uint8_t> seen(static_cast<size_t>(layers) * experts, 0);
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    RankedExpert ranked;
    bool used = false;
    LODE_RETURN_IF_ERROR(ParseLine(text.substr(0, end), number, layers, experts, &ranked, &used));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!used) continue;
    uint8_t& twice = seen[static_cast<size_t>(ranked.ref.layer) * experts + ranked.ref.expert];
    if (twice) {
      return InvalidArgument("profile line {}: layer {} expert {} stands there a second time",
                             number, ranked.ref.layer, ranked.ref.expert);
    }
    twice = 1;
    ranking.push_back(ranked);
  }
  return ranking;
}

std::string RankingText(std::span<const double> scores, uint32_t layers, uint32_t experts) {
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < layers * experts; ++i) {
    if (scores[i] > 0) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
  std::string text = "# layer expert score\n";
  for (const uint32_t i : order) {
    text += fmt::format("{} {} {}\n", i / experts, i % experts, static_cast<float>(scores[i]));
  }
  return text;
}

std::vector<ExpertRef> PlacementOrder(std::span<const RankedExpert> ranking, uint32_t layers,
                                      uint32_t experts) {
  std::vector<RankedExpert> sorted(ranking.begin(), ranking.end());
  std::sort(sorted.begin(), sorted.end(), [](const RankedExpert& a, const RankedExpert& b) {
    return std::make_tuple(-a.score, a.ref.layer, a.ref.expert) <
           std::make_tuple(-b.score, b.ref.layer, b.ref.expert);
  });
  std::vector<ExpertRef> order;
  order.reserve(static_cast<size_t>(layers) * experts);
  std::vector<uint8_t> listed(static_cast<size_t>(layers) * experts, 0);
  for (const RankedExpert& ranked : sorted) {
    order.push_back(ranked.ref);
    listed[static_cast<size_t>(ranked.ref.layer) * experts + ranked.ref.expert] = 1;
  }
  for (uint32_t expert = 0; expert < experts; ++expert) {
    for (uint32_t layer = 0; layer < layers; ++layer) {
      if (listed[static_cast<size_t>(layer) * experts + expert]) continue;
      order.push_back({static_cast<uint16_t>(layer), static_cast<uint16_t>(expert)});
    }
  }
  return order;
}

Placement PlaceExperts(std::span<const ExpertRef> order, std::span<const uint64_t> slot_bytes,
                       uint64_t budget_bytes) {
  Placement placement;
  placement.resident.resize(slot_bytes.size());
  for (const ExpertRef& ref : order) {
    const uint64_t bytes = slot_bytes[ref.layer];
    if (bytes > budget_bytes - placement.bytes) continue;  // a later, smaller slot may still fit
    placement.resident[ref.layer].push_back(ref.expert);
    placement.bytes += bytes;
  }
  return placement;
}

std::vector<ExpertRef> ResizeOrder(std::span<const ExpertRef> order, std::span<const float> counts,
                                   std::span<const uint8_t> resident, uint32_t experts) {
  std::vector<ExpertRef> result(order.begin(), order.end());
  const auto index = [&](const ExpertRef& r) {
    return static_cast<size_t>(r.layer) * experts + r.expert;
  };
  std::stable_sort(result.begin(), result.end(), [&](const ExpertRef& a, const ExpertRef& b) {
    const size_t i = index(a), j = index(b);
    if (resident[i] != resident[j]) return resident[i] > resident[j];
    return counts[i] > counts[j];
  });
  return result;
}

namespace {

// The pairs of one layer: hottest absent against coldest resident, while the newcomer wins by the
// margin.
void PlanLayer(std::span<const float> counts, std::span<const TierState> states, uint16_t layer,
               const LfuParams& params, std::vector<Swap>* swaps) {
  std::vector<uint16_t> absent, resident;
  for (uint32_t e = 0; e < counts.size(); ++e) {
    if (states[e] == TierState::kResident) {
      resident.push_back(static_cast<uint16_t>(e));
    } else if (states[e] == TierState::kAbsent && counts[e] >= params.newcomer_min) {
      absent.push_back(static_cast<uint16_t>(e));
    }
  }
  const auto hotter = [&](uint16_t a, uint16_t b) {
    return std::make_tuple(-counts[a], a) < std::make_tuple(-counts[b], b);
  };
  const auto colder = [&](uint16_t a, uint16_t b) {
    return std::make_tuple(counts[a], a) < std::make_tuple(counts[b], b);
  };
  std::sort(absent.begin(), absent.end(), hotter);
  std::sort(resident.begin(), resident.end(), colder);
  for (size_t i = 0; i < std::min(absent.size(), resident.size()); ++i) {
    const float hot = counts[absent[i]], cold = counts[resident[i]];
    if (!(hot >= cold + params.margin)) break;
    swaps->push_back({layer, absent[i], resident[i], hot - cold});
  }
}

}  // namespace

std::vector<Swap> PlanSwaps(std::span<const float> counts, std::span<const TierState> states,
                            uint32_t layers, uint32_t experts, const LfuParams& params) {
  LODE_CHECK(
      counts.size() == static_cast<size_t>(layers) * experts && states.size() == counts.size(),
      "{} counters for {} layers of {} experts", counts.size(), layers, experts);
  std::vector<Swap> swaps;
  for (uint32_t layer = 0; layer < layers; ++layer) {
    const size_t first = static_cast<size_t>(layer) * experts;
    PlanLayer(counts.subspan(first, experts), states.subspan(first, experts),
              static_cast<uint16_t>(layer), params, &swaps);
  }
  std::sort(swaps.begin(), swaps.end(), [](const Swap& a, const Swap& b) {
    return std::make_tuple(-a.gain, a.layer, a.newcomer) <
           std::make_tuple(-b.gain, b.layer, b.newcomer);
  });
  if (swaps.size() > params.swaps_max) swaps.resize(params.swaps_max);
  return swaps;
}

void DecayCounts(std::span<float> counts, const LfuParams& params) {
  for (float& count : counts) count *= params.decay;
}

}  // namespace lode
