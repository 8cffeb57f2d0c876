// The tokens that the draft head may guess: a file of ids, perhaps with how often each occurs in
// some corpus. A head that scores a tenth of the vocabulary reads a tenth of the output matrix; what
// it cannot name it never guesses, which costs acceptance and no answer. Called while loading.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shared/base/status.h"

namespace lode {

// Text, one "id" or "id count" per line; '#' starts a comment, blank lines are passed over. Ids
// inside the vocabulary, none twice. `top` > 0 keeps the ids with the highest counts (lower id on
// equal counts; no count is 0). Ascending ids; at least one. Errors name the line.
StatusOr<std::vector<int32_t>> ParseDraftVocabulary(std::string_view text, uint32_t top,
                                                    uint32_t vocab);
// The same from a file; an empty path is an empty list, which means every token.
StatusOr<std::vector<int32_t>> ReadDraftVocabulary(const std::string& path, uint32_t top,
                                                   uint32_t vocab);

}  // namespace lode
