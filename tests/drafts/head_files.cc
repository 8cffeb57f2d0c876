// See head_files.h.
#include "tests/drafts/head_files.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "shared/base/check.h"
#include "shared/gguf/gguf.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/places.h"

namespace lode::testing {
namespace {

constexpr uint32_t kF32 = 0, kQ8_0 = 8;  // GGUF type ids
constexpr size_t kQ8Block = 32;

// binary16 of a positive normal number below 65504, rounded to nearest.
uint16_t Half(float x) {
  int exponent = 0;
  const float mantissa = std::frexp(x, &exponent);  // [0.5, 1)
  const auto bits = static_cast<uint32_t>(std::lround(std::ldexp(mantissa, 11)));
  return static_cast<uint16_t>(((exponent + 14) << 10) + (bits - 1024));
}

void QuantiseQ8(test::WrittenTensor* t) {
  LODE_CHECK(t->type == kF32, "{} is not F32", t->name);
  const size_t n = t->data.size() / sizeof(float);
  std::vector<float> values(n);
  std::memcpy(values.data(), t->data.data(), t->data.size());
  std::vector<uint8_t> out;
  for (size_t at = 0; at < n; at += kQ8Block) {
    float amax = 1e-3f;
    for (size_t i = 0; i < kQ8Block; ++i) amax = std::max(amax, std::fabs(values[at + i]));
    const float d = amax / 127;
    const uint16_t half = Half(d);
    out.push_back(static_cast<uint8_t>(half & 0xff));
    out.push_back(static_cast<uint8_t>(half >> 8));
    for (size_t i = 0; i < kQ8Block; ++i)
      out.push_back(static_cast<uint8_t>(static_cast<int8_t>(std::lround(values[at + i] / d))));
  }
  t->type = kQ8_0;
  t->data = std::move(out);
}

}  // namespace

void WriteDraftHead(const HeadForm& form, const std::string& path) {
  const auto file = GgufFile::Open(TestSources() + "/tests/models/demo-q4-with-mtp.gguf");
  LODE_CHECK(file.ok(), "{}", Message(file.status()));
  test::GgufWriter writer = test::GgufWriter::From(**file);
  std::vector<test::WrittenTensor>& tensors = writer.tensors();
  std::erase_if(tensors, [&](const test::WrittenTensor& t) {
    const bool embedding = t.name == "token_embd.weight" || t.name == "output.weight";
    return !t.name.starts_with("blk.8.") && !(form.own_embedding && embedding);
  });
  for (test::WrittenTensor& t : tensors) {
    t.offset = -1;
    if (form.q8_inject && t.name.find("_inject.weight") != std::string::npos) QuantiseQ8(&t);
  }
  if (!form.own_embedding) writer.SetBool("qwen4exp.nextn_shared_target_tensors", true);
  writer.Write(path);
}

}  // namespace lode::testing
