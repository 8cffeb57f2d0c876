// Which combinations of factors a test runs, out of a product that is too large to run whole: a
// deterministic choice that covers every triple of values of any three factors, then as many
// quadruples as the wanted number holds. Two faults that only show together are found by any pair,
// so triples leave a margin. Pure; test processes only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lode {

// Combination[f] is the index of factor f's value.
using Combination = std::vector<uint32_t>;

// All of them, the last factor fastest.
std::vector<Combination> FullProduct(const std::vector<uint32_t>& values_per_factor);

// At least `n_min` combinations (fewer only when the product has fewer), no one twice, that cover
// every tuple of `strength` factors' values. The same input gives the same list on every machine.
std::vector<Combination> ChooseCombinations(const std::vector<uint32_t>& values_per_factor,
                                            size_t n_min, uint32_t strength = 3);

}  // namespace lode
