// Segments, fd passing, wait word and ring on the real platform: refusals, two processes under
// stress, threads (clean under TSan). Labels: unit.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <thread>

#include "shared/shm/ring.h"
#include "shared/shm/segment.h"

namespace lode {
namespace {

constexpr uint64_t kNsPerMs = 1'000'000;
uint64_t In(uint64_t ms) { return NowNs() + ms * kNsPerMs; }

Fd Dup(int fd) { return Fd(fcntl(fd, F_DUPFD_CLOEXEC, 3)); }

std::string Refusal(Fd fd, size_t min_bytes, Segment::Access access = Segment::Access::kReadWrite) {
  const auto segment = Segment::Attach(std::move(fd), "x", min_bytes, access);
  return segment.ok() ? "" : Message(segment.status());
}

TEST(Segment, CreateAndAttach) {
  auto a = Segment::Create("test", 10000);
  ASSERT_TRUE(a.ok()) << a.status().message();
  EXPECT_EQ((*a)->size(), 10000u);
  EXPECT_EQ((*a)->data()[9999], 0);
  (*a)->data()[9999] = 42;
  auto b = Segment::Attach(Dup((*a)->fd()), "test", 10000, Segment::Access::kReadOnly);
  ASSERT_TRUE(b.ok());
  EXPECT_EQ((*b)->data()[9999], 42);
  EXPECT_NE((*a)->data(), (*b)->data());
  // Visible in /proc by its label.
  std::ifstream maps("/proc/self/maps");
  const std::string all((std::istreambuf_iterator<char>(maps)), {});
  EXPECT_NE(all.find("memfd:lode-test"), std::string::npos);
  EXPECT_FALSE(Segment::Create("empty", 0).ok());
}

TEST(Segment, LargeOnesStartOnAHugePage) {
  for (size_t bytes : {Segment::kHugePageBytes, 3 * Segment::kHugePageBytes + 5}) {
    auto s = *Segment::Create("large", bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(s->data()) % Segment::kHugePageBytes, 0u);
    EXPECT_EQ(s->size(), bytes);
    s->data()[bytes - 1] = 1;
  }
}

TEST(Segment, SealsHold) {
  auto s = *Segment::Create("sealed", 8192);
  EXPECT_NE(ftruncate(s->fd(), 4096), 0);
  EXPECT_NE(ftruncate(s->fd(), 16384), 0);
  EXPECT_NE(fcntl(s->fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(Segment, RefusesWhatIsNotASealedMemfd) {
  EXPECT_NE(Refusal(Fd(), 1).find("no memfd"), std::string::npos);
  EXPECT_NE(Refusal(Fd(open("/dev/zero", O_RDWR | O_CLOEXEC)), 1).find("no memfd"),
            std::string::npos);
  int pair[2];
  ASSERT_EQ(pipe2(pair, O_CLOEXEC), 0);
  Fd write_end(pair[1]);
  EXPECT_NE(Refusal(Fd(pair[0]), 1), "");
  const auto memfd = [](int seals, off_t bytes) {
    Fd fd(memfd_create("t", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(fd.get(), bytes), 0);
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
    return fd;
  };
  EXPECT_NE(Refusal(memfd(0, 4096), 1).find("not sealed"), std::string::npos);
  EXPECT_NE(Refusal(memfd(F_SEAL_SHRINK, 4096), 1).find("not sealed"), std::string::npos);
  EXPECT_NE(Refusal(memfd(F_SEAL_SHRINK | F_SEAL_GROW, 4096), 1).find("not sealed"),
            std::string::npos);
  EXPECT_NE(Refusal(memfd(F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL, 0), 0).find("0 bytes"),
            std::string::npos);
  EXPECT_NE(Refusal(memfd(F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL, 4096), 4097).find("4097"),
            std::string::npos);
  EXPECT_NE(Refusal(memfd(F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL, 4096), 1)
                .find("against writing"),
            std::string::npos);
  EXPECT_EQ(Refusal(memfd(F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL, 4096), 4096), "");
}

class FdPassing : public ::testing::Test {
 protected:
  void SetUp() override {
    int pair[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    a_.Reset(pair[0]);
    b_.Reset(pair[1]);
  }
  // A raw message of `bytes` bytes and `n_fds` fds.
  void SendRaw(size_t bytes, size_t n_fds) {
    std::vector<char> data(std::max<size_t>(bytes, 1), 'x');
    iovec part = {data.data(), bytes};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 16)] = {};
    msghdr header = {};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (n_fds > 0) {
      header.msg_control = control;
      header.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
      cmsghdr* c = CMSG_FIRSTHDR(&header);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int) * n_fds);
      for (size_t i = 0; i < n_fds; ++i) {
        const int fd = a_.get();
        std::memcpy(CMSG_DATA(c) + i * sizeof(int), &fd, sizeof(int));
      }
    }
    ASSERT_EQ(sendmsg(a_.get(), &header, 0), static_cast<ssize_t>(bytes));
  }
  StatusCode Recv(uint64_t ms = 50) { return RecvFd(b_.get(), &message_, In(ms)).status().code(); }
  static size_t OpenFds() {
    size_t n = 0;
    for (int fd = 0; fd < 256; ++fd) n += fcntl(fd, F_GETFD) != -1;
    return n;
  }
  Fd a_, b_;
  FdMessage message_ = {};
};

TEST_F(FdPassing, RoundTrip) {
  auto s = *Segment::Create("arena", 4096);
  s->data()[7] = 9;
  ASSERT_TRUE(SendFd(a_.get(), MakeFdMessage("arena", 3, 12, 4096), s->fd()).ok());
  auto fd = RecvFd(b_.get(), &message_, In(1000));
  ASSERT_TRUE(fd.ok()) << fd.status().message();
  EXPECT_STREQ(message_.label, "arena");
  EXPECT_EQ(message_.index, 3u);
  EXPECT_EQ(message_.generation, 12u);
  EXPECT_EQ(message_.bytes, 4096u);
  EXPECT_NE(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, 0);
  auto t = *Segment::Attach(std::move(*fd), "arena", 4096, Segment::Access::kReadOnly);
  EXPECT_EQ(t->data()[7], 9);
}

TEST_F(FdPassing, TimesOutAndSeesTheEnd) {
  const uint64_t start = NowNs();
  EXPECT_EQ(Recv(30), StatusCode::kDeadlineExceeded);
  EXPECT_GE(NowNs() - start, 29 * kNsPerMs);
  a_.Reset();
  EXPECT_EQ(Recv(), StatusCode::kUnavailable);
}

TEST_F(FdPassing, MalformedMessagesAreRefusedAndLeakNothing) {
  const size_t before = OpenFds();
  const size_t kSize = sizeof(FdMessage);
  for (const auto& [bytes, fds] : {std::pair<size_t, size_t>{kSize, 0},
                                   {kSize, 2},
                                   {kSize - 1, 1},
                                   {kSize + 1, 1},
                                   {kSize, 8},
                                   {kSize, 12},
                                   {4000, 1}}) {
    SendRaw(bytes, fds);
    EXPECT_EQ(Recv(), StatusCode::kInvalidArgument) << bytes << " bytes " << fds << " fds";
  }
  EXPECT_EQ(OpenFds(), before);
  // A label without an end is cut.
  SendRaw(kSize, 1);
  EXPECT_EQ(Recv(), StatusCode::kOk);
  EXPECT_EQ(std::strlen(message_.label), sizeof(message_.label) - 1);
}

TEST(WaitWord, DeadlinesAndWakes) {
  WaitWord word = {};
  const uint64_t start = NowNs();
  EXPECT_EQ(WaitChange(word, 0, {0, In(30)}), 0u);
  EXPECT_EQ(WaitChange(word, 0, {10 * kNsPerMs, In(30)}), 0u);
  EXPECT_GE(NowNs() - start, 59 * kNsPerMs);
  EXPECT_EQ(WaitChange(word, 5, {0, In(1000)}), 0u);  // already different
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    Publish(word, 3);
  });
  EXPECT_EQ(WaitChange(word, 0, {0, In(5000)}), 3u);
  other.join();
  EXPECT_EQ(word.sleepers.load(), 0u);
  // A publisher that cannot wake (a GPU) is noticed after a slice at the latest.
  std::thread gpu([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    word.value.store(4, std::memory_order_release);
  });
  const uint64_t before = NowNs();
  EXPECT_EQ(WaitChange(word, 3, {0, In(5000)}), 4u);
  EXPECT_LT(NowNs() - before, 2000 * kNsPerMs);  // a slice, not the deadline; the machine may be busy
  gpu.join();
  std::thread waker([&] {
    for (int i = 0; i < 50; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      WakeAll(word);
    }
  });
  const uint64_t wake_start = NowNs();
  EXPECT_EQ(WaitChange(word, 4, {0, In(5000)}),
            4u);  // WakeAll: the old value, long before the deadline
  EXPECT_LT(NowNs() - wake_start, 2000 * kNsPerMs);
  waker.join();
}

struct Item {
  uint64_t sequence, check[7];
};
Item MakeItem(uint64_t i) {
  Item item = {i, {}};
  for (uint64_t k = 0; k < 7; ++k) item.check[k] = i * 0x9e3779b97f4a7c15ull + k;
  return item;
}
struct Shared {
  SpscRing<Item, 4> ring;
  SpscRing<uint64_t, 2> back;
};

// False when an item is lost, repeated, torn or late.
bool Consume(Shared* s, uint64_t count, uint64_t spin_ns) {
  for (uint64_t i = 1; i <= count; ++i) {
    Item item = {};
    if (!s->ring.Pop(&item, {spin_ns, In(20000)})) return false;
    const Item want = MakeItem(i);
    if (std::memcmp(&item, &want, sizeof(item)) != 0) return false;
    if (i % 64 == 0) {
      while (!s->back.TryPush(i)) std::this_thread::yield();
    }
  }
  return true;
}
// A wait may return without a new value (WakeAll, or the late wake of the publication that the waiter
// has seen already): only the deadline ends the attempt.
bool PushBy(Shared* s, const Item& item, uint64_t spin_ns, uint64_t deadline_ns) {
  for (;;) {
    const uint64_t tail = s->ring.tail.value.load(std::memory_order_acquire);
    if (s->ring.TryPush(item)) return true;
    if (NowNs() >= deadline_ns) return false;
    WaitChange(s->ring.tail, tail, {spin_ns, deadline_ns});
  }
}
bool Produce(Shared* s, uint64_t count, uint64_t spin_ns) {
  for (uint64_t i = 1; i <= count; ++i) {
    if (!PushBy(s, MakeItem(i), spin_ns, In(20000))) return false;
    uint64_t echo = 0;
    if (i % 64 == 0 && (!s->back.Pop(&echo, {spin_ns, In(20000)}) || echo != i)) return false;
  }
  return true;
}

TEST(Ring, ThreadsUnderStress) {
  constexpr uint64_t kItems = 20000;
  for (uint64_t spin_ns : {uint64_t{0}, uint64_t{50000}}) {
    auto shared = std::make_unique<Shared>();
    bool consumed = false;
    std::thread consumer([&] { consumed = Consume(shared.get(), kItems, spin_ns); });
    EXPECT_TRUE(Produce(shared.get(), kItems, spin_ns));
    consumer.join();
    EXPECT_TRUE(consumed);
  }
}

TEST(Ring, TwoProcessesUnderStress) {
  constexpr uint64_t kItems = 50000;
  for (uint64_t spin_ns : {uint64_t{0}, uint64_t{20000}}) {
    auto segment = *Segment::Create("ring", sizeof(Shared));
    const pid_t child = fork();
    if (child == 0) {
      // Another mapping of the same memfd: a private futex would never wake across.
      auto mine =
          Segment::Attach(Dup(segment->fd()), "ring", sizeof(Shared), Segment::Access::kReadWrite);
      _exit(mine.ok() && Consume((*mine)->As<Shared>(), kItems, spin_ns) ? 0 : 1);
    }
    EXPECT_TRUE(Produce(segment->As<Shared>(), kItems, spin_ns));
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
}

// A consumer that is killed while it sleeps leaves the producer unharmed, and a new consumer goes
// on where it was.
TEST(Ring, KilledConsumer) {
  auto segment = *Segment::Create("ring", sizeof(Shared));
  Shared* s = segment->As<Shared>();
  const pid_t child = fork();
  if (child == 0) {
    Item item;
    s->ring.Pop(&item, {0, In(60000)});
    _exit(1);
  }
  while (s->ring.head.sleepers.load() == 0) std::this_thread::yield();
  kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(s->ring.TryPush(MakeItem(1)));
  EXPECT_TRUE(Consume(s, 1, 0));
}

TEST(Ring, FullEmptyAndBrokenPeers) {
  auto ring = std::make_unique<SpscRing<uint64_t, 4>>();
  uint64_t v = 0;
  EXPECT_FALSE(ring->TryPop(&v));
  for (uint64_t i = 0; i < 4; ++i) EXPECT_TRUE(ring->TryPush(i));
  EXPECT_FALSE(ring->TryPush(9));
  for (uint64_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(ring->TryPop(&v));
    EXPECT_EQ(v, i);
  }
  // A head that no producer could have written: treated as empty, and Pop ends at its deadline.
  ring->head.value.store(1000);
  EXPECT_FALSE(ring->TryPop(&v));
  const uint64_t start = NowNs();
  EXPECT_FALSE(ring->Pop(&v, {0, In(30)}));
  EXPECT_LT(NowNs() - start, 5000 * kNsPerMs);
}

TEST(LayoutHash, SeesEveryValueAndItsPlace) {
  static_assert(LayoutHash({1, 2}) != LayoutHash({2, 1}));
  static_assert(LayoutHash({1, 2}) != LayoutHash({1, 3}));
  static_assert(LayoutHash({}) == 0xcbf29ce484222325ull);
}

}  // namespace
}  // namespace lode
