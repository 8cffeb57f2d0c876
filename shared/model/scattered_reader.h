// Many small reads of one file in one go: the n-gram table's rows, 16 per token. With io_uring all reads of a batch are
// in flight together; mapping the file instead would take its page faults one after the other. Where the kernel forbids
// io_uring, pread reads the pieces one by one. Called by the threads that gather n-gram rows.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "shared/base/fd.h"
#include "shared/base/status.h"

namespace lode {

// Reads exactly `bytes` at `offset`; errors name `path` and the offset. Short files are errors.
Status PreadExactly(int fd, const std::string& path, uint64_t offset, uint64_t bytes, uint8_t* out);

// Thread-safe: one batch at a time.
class ScatteredReader {
 public:
  // Opens a description of its own on `fd`'s file, so that switching off readahead does not slow sequential loading.
  // `use_ring` false: always pread (tests, and the same bytes by definition).
  ScatteredReader(int fd, std::string path, bool use_ring = true);
  ~ScatteredReader();

  // Piece i, `piece_bytes` long at offsets[i], goes to out + i * piece_bytes. DeadlineExceeded when the disk does not
  // answer within kReadSecondsMax.
  Status Read(std::span<const uint64_t> offsets, uint32_t piece_bytes, uint8_t* out);

  bool uses_ring() const;

 private:
  struct Ring;
  Status ReadPart(std::span<const uint64_t> offsets, uint32_t piece_bytes, uint8_t* out);  // mutex_ held
  Status WaitAll(size_t count, uint32_t piece_bytes, std::span<const uint64_t> offsets, uint8_t* out);

  const std::string path_;
  Fd own_fd_;
  int fd_;  // own_fd_, or the caller's when that could not be opened
  mutable std::mutex mutex_;
  std::unique_ptr<Ring> ring_;  // null: pread. Guarded by mutex_
};

}  // namespace lode
