// SendFd and RecvFd: one SOCK_SEQPACKET message carries one FdMessage and one fd (SCM_RIGHTS).
// SEQPACKET keeps message borders, so a tag can never be read apart from its fd.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "shared/base/check.h"
#include "shared/shm/segment.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

constexpr uint64_t kNsPerMs = 1'000'000;
// Room for more fds than one: a peer that sends several is noticed, and all of them are closed.
constexpr size_t kFdsMax = 8;

Status CheckPeerUser(int socket) {
  ucred peer = {};
  socklen_t length = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
    return ErrnoStatus("SO_PEERCRED of the fd socket", errno);
  if (peer.uid != geteuid()) {
    return Error(StatusCode::kPermissionDenied,
                 "the fd socket belongs to user id {} (process {}), this process runs as {}",
                 peer.uid, peer.pid, geteuid());
  }
  return OkStatus();
}

Status WaitReadable(int socket, uint64_t deadline_ns) {
  for (;;) {
    const uint64_t now = NowNs();
    const uint64_t left_ms = now >= deadline_ns ? 0 : (deadline_ns - now + kNsPerMs - 1) / kNsPerMs;
    pollfd entry = {socket, POLLIN, 0};
    const int n = poll(&entry, 1, static_cast<int>(std::min<uint64_t>(left_ms, 1000)));
    if (n > 0) return OkStatus();
    if (n < 0 && errno != EINTR) return ErrnoStatus("poll of the fd socket", errno);
    if (NowNs() >= deadline_ns)
      return DeadlineExceeded("no segment arrived over the fd socket in time");
  }
}

// Takes every fd out of the control data; an attacker's or a bug's surplus is closed by the
// destructors.
size_t TakeFds(msghdr* header, Fd* fds) {
  size_t count = 0;
  for (cmsghdr* c = CMSG_FIRSTHDR(header); c != nullptr; c = CMSG_NXTHDR(header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n && count < kFdsMax; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      fds[count++].Reset(fd);
    }
  }
  return count;
}

}  // namespace

FdMessage MakeFdMessage(const std::string& label, uint32_t index, uint32_t generation,
                        uint64_t bytes) {
  FdMessage message = {};
  LODE_CHECK(label.size() < sizeof(message.label), "segment label '{}' is too long", label);
  std::memcpy(message.label, label.data(), label.size());
  message.index = index;
  message.generation = generation;
  message.bytes = bytes;
  return message;
}

Status SendFd(int socket, const FdMessage& message, int fd) {
  FdMessage copy = message;
  iovec part = {&copy, sizeof(copy)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  cmsghdr* c = CMSG_FIRSTHDR(&header);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(c), &fd, sizeof(fd));
  // MSG_DONTWAIT: a peer that reads nothing must not stop the sender; the socket buffer holds far
  // more messages than we send.
  ssize_t n = -1;
  do {
    n = sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0) return ErrnoStatus(fmt::format("sending segment '{:.31}'", copy.label), errno);
  return OkStatus();
}

StatusOr<Fd> RecvFd(int socket, FdMessage* message, uint64_t deadline_ns) {
  LODE_RETURN_IF_ERROR(CheckPeerUser(socket));
  LODE_RETURN_IF_ERROR(WaitReadable(socket, deadline_ns));
  char bytes[sizeof(FdMessage) + 1] = {};  // one more than a message: longer ones are noticed
  iovec part = {bytes, sizeof(bytes)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdsMax)] = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t n = -1;
  do {
    n = recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0) return ErrnoStatus("receiving a segment", errno);
  if (n == 0) return Unavailable("the peer closed the fd socket");
  Fd fds[kFdsMax];
  const size_t count = TakeFds(&header, fds);
  if (n != sizeof(FdMessage) || count != 1 || (header.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) != 0) {
    return InvalidArgument("malformed segment message: {} bytes and {} fds, expected {} and 1", n,
                           count, sizeof(FdMessage));
  }
  std::memcpy(message, bytes, sizeof(FdMessage));
  message->label[sizeof(message->label) - 1] = '\0';
  return std::move(fds[0]);
}

}  // namespace lode
