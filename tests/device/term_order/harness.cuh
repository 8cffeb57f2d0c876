// Frame of the term-order measurement: one Section object collects values (JSON), table lines and
// failures; CUDA errors end the section, never the program. Random data is a pure function of
// (seed, index), the same on host and device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "kernels/canonical.h"

namespace lode::term_order {

class Section {
 public:
  explicit Section(std::string name) : name_(std::move(name)) {}

  // False, and the section has failed, when `error` is not success. Clears the sticky part of the
  // error state it can clear.
  bool Ok(cudaError_t error, const char* what, int line) {
    if (error == cudaSuccess) return true;
    cudaGetLastError();
    char text[256];
    std::snprintf(text, sizeof text, "%s (line %d): %s", what, line, cudaGetErrorString(error));
    Fail(text);
    return false;
  }
  bool Expect(bool holds, const std::string& what) {
    ++checks_;
    if (!holds) Fail(what);
    return holds;
  }
  void Fail(const std::string& what) {
    failures_.push_back(what);
    std::printf("  FAIL %s: %s\n", name_.c_str(), what.c_str());
    std::fflush(stdout);
  }
  void Value(const std::string& key, double value) { values_.emplace_back(key, value); }
  __attribute__((format(printf, 2, 3))) void Line(const char* format, ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    std::vsnprintf(text, sizeof text, format, args);
    va_end(args);
    table_.emplace_back(text);
    std::printf("  %s\n", text);
    std::fflush(stdout);
  }
  // A section that checked nothing has not passed.
  bool passed() const { return failures_.empty() && checks_ > 0; }

  // Writes FOLDER/NAME.json (one object) and FOLDER/NAME.table (lines for the summary).
  bool Write(const std::string& folder) const {
    std::FILE* json = std::fopen((folder + "/" + name_ + ".json").c_str(), "w");
    std::FILE* table = std::fopen((folder + "/" + name_ + ".table").c_str(), "w");
    if (json == nullptr || table == nullptr) return false;
    std::fprintf(json, "{\"pass\": %s, \"checks\": %d, \"failures\": [",
                 passed() ? "true" : "false", checks_);
    for (size_t i = 0; i < failures_.size(); ++i)
      std::fprintf(json, "%s\"%s\"", i ? ", " : "", Escaped(failures_[i]).c_str());
    std::fprintf(json, "]");
    for (const auto& [key, value] : values_) {
      if (std::isfinite(value)) std::fprintf(json, ",\n  \"%s\": %.9g", key.c_str(), value);
    }
    std::fprintf(json, "}\n");
    std::fprintf(table, "[%s] %s, %d checks\n", name_.c_str(), passed() ? "PASS" : "FAIL", checks_);
    for (const std::string& line : table_) std::fprintf(table, "  %s\n", line.c_str());
    for (const std::string& line : failures_) std::fprintf(table, "  FAIL %s\n", line.c_str());
    return std::fclose(json) == 0 && std::fclose(table) == 0;
  }

 private:
  static std::string Escaped(const std::string& text) {
    std::string out;
    for (char c : text) {
      if (c == '"' || c == '\\') out += '\\';
      out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return out;
  }
  std::string name_;
  int checks_ = 0;
  std::vector<std::pair<std::string, double>> values_;
  std::vector<std::string> failures_, table_;
};

// Ends the calling function (which returns `result`) when a CUDA call fails.
#define LODE_TRY(section, call, result)                        \
  do {                                                         \
    if (!(section).Ok((call), #call, __LINE__)) return result; \
  } while (0)

template <class T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }
  cudaError_t Allocate(size_t n) {
    n_ = n;
    return cudaMalloc(&data_, n * sizeof(T));
  }
  cudaError_t Upload(const std::vector<T>& host) {
    const cudaError_t error = Allocate(host.size());
    if (error != cudaSuccess) return error;
    return cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  cudaError_t Download(std::vector<T>& host, size_t first, size_t n) const {
    host.resize(n);
    return cudaMemcpy(host.data(), data_ + first, n * sizeof(T), cudaMemcpyDeviceToHost);
  }
  // 0xff everywhere: a NaN that no kernel writes.
  cudaError_t Poison() { return cudaMemset(data_, 0xff, n_ * sizeof(T)); }
  T* get() const { return data_; }
  size_t size() const { return n_; }

 private:
  T* data_ = nullptr;
  size_t n_ = 0;
};

inline constexpr int kWarmups = 3, kRepeats = 25;

// Median milliseconds of one call of `launch` (which enqueues on the default stream), over kRepeats
// event pairs that each enclose `inner` calls. Negative when something failed.
template <class Launch>
double MedianMs(Section& section, int inner, Launch launch) {
  cudaEvent_t start = nullptr, stop = nullptr;
  LODE_TRY(section, cudaEventCreate(&start), -1);
  LODE_TRY(section, cudaEventCreate(&stop), -1);
  for (int i = 0; i < kWarmups * inner; ++i) launch();
  LODE_TRY(section, cudaGetLastError(), -1);
  LODE_TRY(section, cudaDeviceSynchronize(), -1);
  std::vector<float> times;
  for (int i = 0; i < kRepeats; ++i) {
    LODE_TRY(section, cudaEventRecord(start), -1);
    for (int k = 0; k < inner; ++k) launch();
    LODE_TRY(section, cudaEventRecord(stop), -1);
    LODE_TRY(section, cudaEventSynchronize(stop), -1);
    LODE_TRY(section, cudaGetLastError(), -1);
    float ms = 0;
    LODE_TRY(section, cudaEventElapsedTime(&ms, start, stop), -1);
    times.push_back(ms / static_cast<float>(inner));
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return times[kRepeats / 2];
}

// A well-mixed 32-bit value of (seed, index): two rounds of multiply-xorshift over 64 bits.
LODE_FN uint32_t Random(uint32_t seed, uint64_t index) {
  uint64_t x = index + 0x9e3779b97f4a7c15ull * (seed + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>((x ^ (x >> 31)) >> 16);
}
// Uniform in [-1, 1).
LODE_FN float RandomUnit(uint32_t seed, uint64_t index) {
  return canonical::Mul(static_cast<float>(static_cast<int32_t>(Random(seed, index)) >> 8),
                        1.1920928955078125e-7f);
}

}  // namespace lode::term_order
