// io_uring batches with a pread fallback: see scattered_reader.h. Called by the threads that gather n-gram rows.
#include "shared/model/scattered_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace lode {
namespace {

// Reads in flight at once: 8 rows of a window x 16 table rows, twice.
constexpr uint32_t kRingEntries = 256;
// Larger pieces gain nothing from a ring and would need a large staging buffer.
constexpr uint32_t kPieceBytesMax = 16384;
// A disk that does not answer for this long is broken; the host's own deadlines are shorter (docs/design).
constexpr int64_t kReadSecondsMax = 30;

}  // namespace

Status PreadExactly(int fd, const std::string& path, uint64_t offset, uint64_t bytes, uint8_t* out) {
  uint64_t done = 0;
  while (done < bytes) {
    const ssize_t got = ::pread(fd, out + done, bytes - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return ErrnoStatus(fmt::format("{}: reading {} bytes at offset {}", path, bytes - done, offset + done), errno);
    }
    if (got == 0) {
      return Unavailable("{}: the file has nothing at offset {}, where {} more bytes belong; it was cut short after it was opened",
                         path, offset + done, bytes - done);
    }
    done += static_cast<uint64_t>(got);
  }
  return OkStatus();
}

// The kernel writes into `staging`, never into a caller's buffer, so a batch that is given up can be abandoned whole.
struct ScatteredReader::Ring {
  io_uring ring{};
  std::vector<uint8_t> staging;
  bool ready = false;
  ~Ring() {
    if (ready) io_uring_queue_exit(&ring);
  }

  // nullptr where the kernel or a sandbox forbids io_uring.
  static std::unique_ptr<Ring> Create() {
    auto made = std::make_unique<Ring>();
    if (io_uring_queue_init(kRingEntries, &made->ring, 0) != 0) return nullptr;
    made->ready = true;
    made->staging.resize(size_t{kRingEntries} * kPieceBytesMax);
    return made;
  }
};

ScatteredReader::ScatteredReader(int fd, std::string path, bool use_ring) : path_(std::move(path)), fd_(fd) {
  own_fd_.Reset(::open(fmt::format("/proc/self/fd/{}", fd).c_str(), O_RDONLY | O_CLOEXEC));
  if (own_fd_.valid()) {
    fd_ = own_fd_.get();
    ::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
  }
  if (use_ring) ring_ = Ring::Create();
}

ScatteredReader::~ScatteredReader() = default;

bool ScatteredReader::uses_ring() const {
  std::lock_guard lock(mutex_);
  return ring_ != nullptr;
}

Status ScatteredReader::Read(std::span<const uint64_t> offsets, uint32_t piece_bytes, uint8_t* out) {
  std::lock_guard lock(mutex_);
  while (!offsets.empty()) {
    const size_t count = std::min<size_t>(offsets.size(), kRingEntries);
    LODE_RETURN_IF_ERROR(ReadPart(offsets.first(count), piece_bytes, out));
    offsets = offsets.subspan(count);
    out += count * piece_bytes;
  }
  return OkStatus();
}

Status ScatteredReader::ReadPart(std::span<const uint64_t> offsets, uint32_t piece_bytes, uint8_t* out) {
  if (ring_ == nullptr || piece_bytes > kPieceBytesMax) {
    for (size_t i = 0; i < offsets.size(); ++i) {
      LODE_RETURN_IF_ERROR(PreadExactly(fd_, path_, offsets[i], piece_bytes, out + i * piece_bytes));
    }
    return OkStatus();
  }
  for (size_t i = 0; i < offsets.size(); ++i) {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_->ring);  // never null: the ring is empty and holds kRingEntries
    io_uring_prep_read(sqe, fd_, ring_->staging.data() + i * piece_bytes, piece_bytes, offsets[i]);
    io_uring_sqe_set_data64(sqe, i);
  }
  return WaitAll(offsets.size(), piece_bytes, offsets, out);
}

Status ScatteredReader::WaitAll(size_t count, uint32_t piece_bytes, std::span<const uint64_t> offsets, uint8_t* out) {
  size_t submitted = 0;
  std::vector<size_t> again;  // short or refused reads, finished with pread after the batch
  for (size_t done = 0; done < count;) {
    io_uring_cqe* cqe = nullptr;
    if (submitted < count) {
      const int sent = io_uring_submit(&ring_->ring);
      if (sent > 0) submitted += static_cast<size_t>(sent);
      if (sent < 0 && sent != -EINTR && sent != -EAGAIN && sent != -EBUSY) {
        static_cast<void>(ring_.release());  // leaked on purpose: reads may still be writing into its staging buffer
        return ErrnoStatus(fmt::format("{}: submitting reads to io_uring", path_), -sent);
      }
    }
    __kernel_timespec limit{.tv_sec = kReadSecondsMax, .tv_nsec = 0};
    const int waited = io_uring_wait_cqe_timeout(&ring_->ring, &cqe, &limit);
    if (waited == -EINTR) continue;
    if (waited < 0) {
      static_cast<void>(ring_.release());  // as above; later batches use pread
      return DeadlineExceeded("{}: {} of {} scattered reads were not answered within {} s ({}); check the disk", path_,
                              count - done, count, kReadSecondsMax, std::strerror(-waited));
    }
    const size_t i = io_uring_cqe_get_data64(cqe);
    const int got = cqe->res;
    io_uring_cqe_seen(&ring_->ring, cqe);
    ++done;
    if (got == static_cast<int>(piece_bytes)) {
      std::memcpy(out + i * piece_bytes, ring_->staging.data() + i * piece_bytes, piece_bytes);
    } else {
      again.push_back(i);
    }
  }
  for (size_t i : again) {
    LODE_RETURN_IF_ERROR(PreadExactly(fd_, path_, offsets[i], piece_bytes, out + i * piece_bytes));
  }
  return OkStatus();
}

}  // namespace lode
