// How fast this machine can read memory with vector loads: the yardstick of the kernel benchmark. A
// kernel that computes at the speed of this loop is bound by the memory bus and by nothing of ours.
// Bytes: every byte of the range once, into a register; no stores, no arithmetic that could bound.
// Any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lode::bench {

// One way of reading: register width and software prefetch. Which one is fastest differs between
// machines, and between cache and memory, so the benchmark tries them and takes the best.
struct MemoryReader {
  const char* name;  // "512 bits, prefetch 2 KiB"
  // Reads bytes [p, p + n) rounded down to whole strides of 512 bytes. The result depends on every
  // byte, so that no load can be left out.
  uint64_t (*read)(const uint8_t* p, size_t n);
};

inline constexpr size_t kReadStride = 512;

// The readers that this CPU can run, at least one (128 bits, always there). Static storage.
size_t MemoryReaders(const MemoryReader** out);

}  // namespace lode::bench
