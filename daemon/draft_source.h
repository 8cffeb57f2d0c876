// Where a draft comes from, as metrics, usage reports and the policy name it.
// No state, no thread of its own; includes nothing.
// Words: docs/glossary.md.
#pragma once

#include <cstdint>

namespace lode {

enum class DraftSource : uint32_t {
  kHead = 0,    // the model's draft head, guessing behind the window before
  kLookup = 1,  // a repetition of the sequence's own tokens
};
inline constexpr uint32_t kDraftSources = 2;

constexpr const char* DraftSourceName(DraftSource source) {
  return source == DraftSource::kHead ? "head" : "lookup";
}

}  // namespace lode
