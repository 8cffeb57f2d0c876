// Greedy covering: the next combination is the one with the most tuples not seen yet, the first of
// the product on ties. See combinations.h.
#include "tests/bits/combinations.h"

#include <algorithm>
#include <set>

namespace lode {
namespace {

// A choice of factors and the values at them, as one number per tuple: factor and value in 8 bits
// each.
using Tuple = uint64_t;

void Tuples(const Combination& c, uint32_t strength, uint32_t first, Tuple prefix,
            std::vector<Tuple>* out) {
  if (strength == 0) {
    out->push_back(prefix);
    return;
  }
  for (uint32_t f = first; f < c.size(); ++f)
    Tuples(c, strength - 1, f + 1, prefix << 16 | (f + 1) << 8 | c[f], out);
}

// Takes combinations until every tuple of `strength` factors was seen, or until `n_max` are taken.
void Cover(const std::vector<Combination>& product, uint32_t strength, size_t n_max,
           std::vector<bool>* used, std::vector<Combination>* taken) {
  std::vector<std::vector<Tuple>> tuples(product.size());
  std::set<Tuple> open;
  for (size_t i = 0; i < product.size(); ++i) {
    Tuples(product[i], strength, 0, 0, &tuples[i]);
    open.insert(tuples[i].begin(), tuples[i].end());
  }
  const auto take = [&](size_t i) {
    for (const Tuple t : tuples[i]) open.erase(t);
  };
  for (size_t i = 0; i < product.size(); ++i) {
    if ((*used)[i]) take(i);
  }
  while (!open.empty() && taken->size() < n_max) {
    size_t best = 0, best_gain = 0;
    for (size_t i = 0; i < product.size(); ++i) {
      if ((*used)[i] || tuples[i].size() <= best_gain) continue;
      size_t gain = 0;
      for (const Tuple t : tuples[i]) gain += open.count(t);
      if (gain > best_gain) best = i, best_gain = gain;
    }
    take(best);
    (*used)[best] = true;
    taken->push_back(product[best]);
  }
}

}  // namespace

std::vector<Combination> FullProduct(const std::vector<uint32_t>& values_per_factor) {
  std::vector<Combination> product = {{}};
  for (const uint32_t values : values_per_factor) {
    std::vector<Combination> longer;
    for (const Combination& c : product) {
      for (uint32_t v = 0; v < values; ++v) {
        longer.push_back(c);
        longer.back().push_back(v);
      }
    }
    product = std::move(longer);
  }
  return product;
}

std::vector<Combination> ChooseCombinations(const std::vector<uint32_t>& values_per_factor,
                                            size_t n_min, uint32_t strength) {
  const std::vector<Combination> product = FullProduct(values_per_factor);
  std::vector<bool> used(product.size());
  std::vector<Combination> taken;
  Cover(product, strength, product.size(), &used, &taken);
  Cover(product, strength + 1, n_min, &used, &taken);
  for (size_t i = 0; i < product.size() && taken.size() < n_min; ++i) {
    if (!used[i]) taken.push_back(product[i]);
  }
  return taken;
}

}  // namespace lode
