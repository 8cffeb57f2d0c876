// libFuzzer target for the GGUF reader and the reading of model numbers and tokenizer facts. Input: the bytes of one
// file. Built with clang and -DLODE_FUZZ=ON; seeds: tests/data/badfiles. How to run: docs/design/formats.md.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "shared/gguf/gguf.h"
#include "shared/model/gguf_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // One memory file for all inputs; the reader wants a path.
  static const int fd = ::memfd_create("gguf-fuzz", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(fd);
  if (::ftruncate(fd, static_cast<off_t>(size)) != 0) std::abort();
  if (size > 0 && ::pwrite(fd, data, size, 0) != static_cast<ssize_t>(size)) std::abort();

  lode::StatusOr<std::unique_ptr<lode::GgufFile>> file = lode::GgufFile::Open(path);
  if (!file.ok()) {
    if (file.status().message().empty()) std::abort();
    return 0;
  }
  uint64_t sum = 0;  // touches what the reader vouches for, so that the sanitizers see it
  for (const lode::GgufTensor& tensor : (*file)->tensors()) {
    if (tensor.bytes > size || tensor.offset > size - tensor.bytes) std::abort();
    sum += tensor.data[0] + tensor.data[tensor.bytes - 1];
  }
  for (std::string_view key : (*file)->keys()) {
    const lode::GgufValue* value = (*file)->FindValue(key);
    for (uint8_t byte : value->raw) sum += byte;
    for (std::string_view text : value->strings) sum += text.empty() ? 0 : static_cast<uint8_t>(text.back());
    (void)(*file)->GetUint(key, 1000);
    (void)(*file)->GetUintArray(key, 1000);
  }
  if (sum == 1) return 0;  // keeps the reads
  lode::StatusOr<lode::ModelConfig> config = lode::ReadModelConfig(**file);
  if (config.ok()) (void)lode::ReadTokenizer(**file, config->vocab);
  return 0;
}
