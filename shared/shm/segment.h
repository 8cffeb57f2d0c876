// Shared memory: memfds, sealed against shrinking and growing, passed between processes by SCM_RIGHTS and mapped through
// Boost.Interprocess. Nothing has a name, so nothing can be squatted or orphaned; the size of /dev/shm does not matter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "shared/base/fd.h"
#include "shared/base/status.h"

namespace lode {

class Segment {
 public:
  enum class Access { kReadWrite, kReadOnly };
  // A new zero-filled memfd of `bytes`, sealed SHRINK|GROW|SEAL, mapped read-write. `label` shows in /proc/PID/maps.
  static StatusOr<std::unique_ptr<Segment>> Create(const std::string& label, size_t bytes);
  // Maps an fd received from a peer. Refuses one that is not a sealed memfd or is smaller than `min_bytes`.
  static StatusOr<std::unique_ptr<Segment>> Attach(Fd fd, const std::string& label, size_t min_bytes, Access access);
  ~Segment();

  uint8_t* data() const;
  size_t size() const;
  int fd() const;
  const std::string& label() const;
  template <class T>
  T* As(size_t offset = 0) const { return reinterpret_cast<T*>(data() + offset); }

 private:
  Segment();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Passing fds: a SOCK_SEQPACKET socketpair between the daemon and each worker, inherited at spawn.
// One message = one fd + a small tag. Peer credentials are checked (same user id) by RecvFd.
struct FdMessage {
  char label[32];       // "window", "exchange", "arena", "status", "checkpoint"
  uint32_t index;       // node or device
  uint32_t generation;
  uint64_t bytes;
};
Status SendFd(int socket, const FdMessage& message, int fd);
StatusOr<Fd> RecvFd(int socket, FdMessage* message, uint64_t deadline_ns);

// FNV-1a over names, offsets and sizes listed by each layout header: attach fails when the two sides were built differently.
constexpr uint64_t LayoutHash(std::initializer_list<uint64_t> values) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (uint64_t v : values) {
    for (int i = 0; i < 8; ++i) h = (h ^ ((v >> (8 * i)) & 0xff)) * 0x100000001b3ull;
  }
  return h;
}

}  // namespace lode
