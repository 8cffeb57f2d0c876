// Shared memory: memfds, sealed against shrinking and growing, passed between processes by
// SCM_RIGHTS and mapped through Boost.Interprocess. Nothing has a name, so nothing can be squatted
// or orphaned; the size of /dev/shm does not matter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

#include "shared/base/fd.h"
#include "shared/base/status.h"

namespace lode {

class Segment {
 public:
  enum class Access { kReadWrite, kReadOnly };
  enum class Pages {
    kNormal,
    kHugeTlb
  };  // kHugeTlb: from the machine's reserved pool, size rounded up to kHugePageBytes
  static constexpr size_t kHugePageBytes = size_t{2} << 20;
  // A new zero-filled memfd of `bytes`, sealed SHRINK|GROW|SEAL, mapped read-write. `label` shows
  // in /proc/PID/maps. Memory is taken when it is first touched, except kHugeTlb, which is reserved
  // here and fails when the pool is too small.
  static StatusOr<std::unique_ptr<Segment>> Create(const std::string& label, size_t bytes,
                                                   Pages pages = Pages::kNormal);
  // Maps an fd received from a peer. Refuses one that is not a sealed memfd or is smaller than
  // `min_bytes`; names the cause.
  static StatusOr<std::unique_ptr<Segment>> Attach(Fd fd, const std::string& label,
                                                   size_t min_bytes, Access access);
  ~Segment();

  uint8_t* data() const;
  size_t size() const;
  int fd() const;
  const std::string& label() const;
  template <class T>
  T* As(size_t offset = 0) const {
    return reinterpret_cast<T*>(data() + offset);
  }

 private:
  Segment();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Passing fds: a SOCK_SEQPACKET socketpair between the daemon and each worker, inherited at spawn.
// One message = one fd + a small tag. Peer credentials are checked (same user id) by RecvFd.
struct FdMessage {
  char label[32];  // "window", "exchange", "arena", "status", "checkpoint"
  uint32_t index;  // node or device
  uint32_t generation;
  uint64_t bytes;
};
static_assert(sizeof(FdMessage) == 48);
// Fills a message; a label longer than 31 characters is our own bug.
FdMessage MakeFdMessage(const std::string& label, uint32_t index, uint32_t generation,
                        uint64_t bytes);
Status SendFd(int socket, const FdMessage& message, int fd);
// Waits for one message until the deadline (absolute, NowNs()). DeadlineExceeded: nothing came;
// Unavailable: the peer closed; PermissionDenied: another user; InvalidArgument: not exactly one fd
// and one FdMessage. `label` is always zero-terminated.
StatusOr<Fd> RecvFd(int socket, FdMessage* message, uint64_t deadline_ns);

// FNV-1a over names, offsets and sizes listed by each layout header: attach fails when the two
// sides were built differently.
constexpr uint64_t LayoutHash(std::initializer_list<uint64_t> values) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (uint64_t v : values) {
    for (int i = 0; i < 8; ++i) h = (h ^ ((v >> (8 * i)) & 0xff)) * 0x100000001b3ull;
  }
  return h;
}

}  // namespace lode
