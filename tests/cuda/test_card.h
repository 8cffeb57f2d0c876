// The card under test: buffers, copies, tile shapes. On machines without one, ok() is false and
// why_not() says what a skipped test prints.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/runtime.h"

namespace lode::testing {

class Buffer {
 public:
  Buffer() = default;
  Buffer(void* memory, size_t bytes) : memory_(memory, &cuda::FreeDevice), bytes_(bytes) {}
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_.get());
  }
  size_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<void, void (*)(void*)> memory_{nullptr, &cuda::FreeDevice};
  size_t bytes_ = 0;
};

class TestCard {
 public:
  TestCard() {
    StatusOr<cuda::CardFacts> facts = cuda::OpenCard(0);
    if (!facts.ok()) {
      why_not_ = Message(facts.status());
      return;
    }
    facts_ = *facts;
    StatusOr<CUstream_st*> stream = cuda::OpenStream();
    if (stream.ok()) {
      stream_ = *stream;
      ok_ = true;
    } else {
      why_not_ = Message(stream.status());
    }
  }
  ~TestCard() {
    if (ok_) cuda::CloseStream(stream_);
  }
  TestCard(const TestCard&) = delete;
  TestCard& operator=(const TestCard&) = delete;

  bool ok() const { return ok_; }
  const std::string& why_not() const { return why_not_; }
  const cuda::CardFacts& facts() const { return facts_; }
  bool real() const { return facts_.name != "emulated card"; }
  CUstream_st* stream() const { return stream_; }

  Buffer Allocate(size_t bytes) const {
    // Kernels read whole words: a matrix's last one may reach two bytes beyond its end.
    StatusOr<void*> memory = cuda::AllocateDevice((bytes + 64) / 64 * 64);
    return memory.ok() ? Buffer(*memory, bytes) : Buffer();
  }
  template <class T>
  Buffer Upload(const std::vector<T>& host) const {
    Buffer b = Allocate(host.size() * sizeof(T));
    cuda::CopyAsync(b.as<void>(), host.data(), b.bytes(), stream_);
    cuda::Synchronize(stream_);
    return b;
  }
  void Download(void* host, const void* device, size_t bytes) const {
    cuda::CopyAsync(host, device, bytes, stream_);
    cuda::Synchronize(stream_);
  }
  std::vector<float> Floats(const Buffer& b, size_t n) const {
    std::vector<float> host(n);
    Download(host.data(), b.as<void>(), n * sizeof(float));
    return host;
  }
  // A value that no product gives.
  void Poison(const Buffer& b) const {
    const std::vector<uint8_t> bytes(b.bytes(), 0x5a);
    cuda::CopyAsync(b.as<void>(), bytes.data(), bytes.size(), stream_);
    cuda::Synchronize(stream_);
  }
  Buffer Window() const {
    return Upload(std::vector<cuda::WindowBlock>{{StepParams{}, cuda::kAllFinite}});
  }
  uint64_t NotFinite(const Buffer& window) const {
    uint64_t word = 0;
    Download(&word, &window.as<cuda::WindowBlock>()->not_finite, sizeof(word));
    return word;
  }

 private:
  bool ok_ = false;
  std::string why_not_;
  cuda::CardFacts facts_;
  CUstream_st* stream_ = nullptr;
};

// Tile shapes that cover every path: fewer and more units than threads, odd tiles, partial groups.
inline std::vector<cuda::ProductShape> Shapes() {
  return {{1, 32},  {3, 64},   {4, 32},   {4, 96},  {5, 160}, {8, 128},
          {12, 96}, {16, 128}, {16, 256}, {4, 320}, {16, 512}};
}

}  // namespace lode::testing
