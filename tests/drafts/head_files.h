// Separate draft heads made from the demo model's own block, in the forms in which heads are
// published: 34 tensors (with embedding and output) or 32 ("shared"), inject gates as F32 or Q8_0.
#pragma once

#include <string>

namespace lode::testing {

struct HeadForm {
  bool own_embedding = false;  // token_embd and output are in the file
  bool q8_inject = false;      // hc_*_inject quantised
};
// Writes the head of the demo model to `path`.
void WriteDraftHead(const HeadForm& form, const std::string& path);

}  // namespace lode::testing
