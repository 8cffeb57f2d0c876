// Fibers of one block: see block.h. A fiber starts once, on its own stack by makecontext; from then
// on it is switched by _setjmp/_longjmp, which makes no system call, and serves one thread of every
// block that comes. Barriers count arrivals of threads that have not
// returned; a whole round in which nobody moved is a hang.
#include "kernels/cuda/emulated/block.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace lode::cuda::emulated {
namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr uint32_t kThreadsMax = 1024;
constexpr uint32_t kWarp = 32;
constexpr size_t kSharedMax = 227 * 1024;  // what the largest card gives one block

struct Barrier {
  uint32_t arrived = 0, generation = 0;
};

struct Fiber {
  std::unique_ptr<uint8_t[]> stack;
  jmp_buf state;
  bool exists = false, done = false;
  const char* waits_for = "";
  struct Copy {
    void* to;
    const void* from;
    uint32_t group;
  };
  std::vector<Copy> copies;
  uint32_t group = 0;  // of the next copy
};

struct Block {
  Place place = {};
  std::vector<Fiber> fibers{kThreadsMax};
  ucontext_t entry, back;
  jmp_buf scheduler;
  uint32_t current = 0, alive = 0, warp_alive[kThreadsMax / kWarp] = {};
  Barrier block_barrier, warp_barrier[kThreadsMax / kWarp];
  uint64_t values[kThreadsMax] = {};
  Words4 words[kThreadsMax] = {};
  std::unique_ptr<uint8_t[]> shared{new uint8_t[kSharedMax + 16]};
  void (*body)(void*) = nullptr;
  void* context = nullptr;
  uint64_t moves = 0;  // barriers passed, threads ended
  uint32_t launches = 0;
};

Block& Get() {
  static Block block;
  return block;
}

void ToScheduler() {
  Block& b = Get();
  Fiber& f = b.fibers[b.current];
  if (_setjmp(f.state) == 0) _longjmp(b.scheduler, 1);
}

void Release(Barrier& barrier, uint32_t alive) {
  if (alive != 0 && barrier.arrived == alive) {
    barrier.arrived = 0;
    ++barrier.generation;
    ++Get().moves;
  }
}

void Wait(Barrier& barrier, uint32_t alive, const char* what) {
  Block& b = Get();
  const uint32_t generation = barrier.generation;
  ++barrier.arrived;
  Release(barrier, alive);
  b.fibers[b.current].waits_for = what;
  while (barrier.generation == generation) ToScheduler();
}

void RunThread() {
  Block& b = Get();
  b.body(b.context);
  const uint32_t warp = b.current / kWarp;
  b.fibers[b.current].done = true;
  --b.alive;
  --b.warp_alive[warp];
  ++b.moves;
  // A thread that has returned counts as arrived for the others.
  Release(b.block_barrier, b.alive);
  Release(b.warp_barrier[warp], b.warp_alive[warp]);
}
void Main() {
  for (;;) {
    RunThread();
    ToScheduler();
  }
}

void Resume(uint32_t thread) {
  Block& b = Get();
  Fiber& f = b.fibers[thread];
  b.current = b.place.thread = thread;
  if (_setjmp(b.scheduler) != 0) return;
  if (f.exists) _longjmp(f.state, 1);
  f.exists = true;
  f.stack.reset(new uint8_t[kStackBytes]);
  getcontext(&b.entry);
  b.entry.uc_stack.ss_sp = f.stack.get();
  b.entry.uc_stack.ss_size = kStackBytes;
  b.entry.uc_link = nullptr;
  makecontext(&b.entry, &Main, 0);
  setcontext(&b.entry);
}

[[noreturn]] void Hang() {
  Block& b = Get();
  std::fprintf(stderr, "emulated device: block (%u, %u, %u) hangs:", b.place.block.x,
               b.place.block.y, b.place.block.z);
  uint32_t shown = 0;
  for (uint32_t t = 0; t < b.place.threads && shown < 8; ++t) {
    if (b.fibers[t].done) continue;
    std::fprintf(stderr, " thread %u waits at a %s barrier;", t, b.fibers[t].waits_for);
    ++shown;
  }
  std::fprintf(stderr, " %u of %u threads have not returned\n", b.alive, b.place.threads);
  std::abort();
}

// Odd launches run the threads of a block backwards, so that an exchange without a barrier cannot
// always be lucky.
void RunBlock() {
  Block& b = Get();
  const uint32_t n = b.place.threads;
  b.alive = n;
  b.block_barrier = {};
  for (uint32_t w = 0; w < kThreadsMax / kWarp; ++w) {
    b.warp_barrier[w] = {};
    b.warp_alive[w] = w * kWarp >= n ? 0 : (n - w * kWarp < kWarp ? n - w * kWarp : kWarp);
  }
  for (uint32_t t = 0; t < n; ++t) {
    b.fibers[t].done = false;
    b.fibers[t].copies.clear();
    b.fibers[t].group = 0;
  }
  ++b.moves;
  while (b.alive > 0) {
    const uint64_t moves = b.moves;
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t t = b.launches % 2 ? n - 1 - i : i;
      if (!b.fibers[t].done) Resume(t);
    }
    if (b.moves == moves) Hang();
  }
}

}  // namespace

const Place& Here() { return Get().place; }
void BarrierBlock() { Wait(Get().block_barrier, Get().alive, "block"); }
void BarrierWarp() {
  const uint32_t warp = Get().current / kWarp;
  Wait(Get().warp_barrier[warp], Get().warp_alive[warp], "warp");
}

uint64_t Exchange(uint64_t value, uint32_t lane) {
  Block& b = Get();
  const uint32_t first = b.current / kWarp * kWarp, from = first + lane % kWarp;
  b.values[b.current] = value;
  BarrierWarp();
  const uint64_t result = from < b.place.threads ? b.values[from] : value;
  BarrierWarp();
  return result;
}

uint32_t Votes(bool mine) {
  Block& b = Get();
  const uint32_t first = b.current / kWarp * kWarp;
  b.values[b.current] = mine;
  BarrierWarp();
  uint32_t votes = 0;
  for (uint32_t l = 0; l < kWarp && first + l < b.place.threads; ++l)
    votes |= static_cast<uint32_t>(b.values[first + l] & 1) << l;
  BarrierWarp();
  return votes;
}

const Words4* Gather(const Words4& mine) {
  Block& b = Get();
  b.words[b.current] = mine;
  BarrierWarp();
  return b.words + b.current / kWarp * kWarp;
}

void CopyLater(void* shared, const void* from) {
  Fiber& f = Get().fibers[Get().current];
  f.copies.push_back({shared, from, f.group});
}
void EndGroup() { ++Get().fibers[Get().current].group; }
void CopyNow(uint32_t groups_left) {
  Fiber& f = Get().fibers[Get().current];
  constexpr size_t kBytes = 16;
  std::vector<Fiber::Copy> left;
  for (const Fiber::Copy& c : f.copies) {
    // Without a limit, copies that no group has taken yet are done as well.
    if (groups_left == 0 || c.group + groups_left < f.group)
      std::memcpy(c.to, c.from, kBytes);
    else
      left.push_back(c);
  }
  f.copies.swap(left);
}

uint8_t* SharedMemory() {
  const uintptr_t p = reinterpret_cast<uintptr_t>(Get().shared.get());
  return reinterpret_cast<uint8_t*>((p + 15) / 16 * 16);
}

void RunGrid(Grid grid, uint32_t threads, size_t shared, void (*body)(void*), void* context) {
  Block& b = Get();
  if (threads == 0 || threads > kThreadsMax || shared > kSharedMax || grid.x == 0 || grid.y == 0 ||
      grid.z == 0) {
    std::fprintf(stderr,
                 "emulated device: a launch of %u x %u x %u blocks of %u threads, %zu bytes\n",
                 grid.x, grid.y, grid.z, threads, shared);
    std::abort();
  }
  ++b.launches;
  b.body = body;
  b.context = context;
  b.place.threads = threads;
  b.place.grid = grid;
  for (uint32_t z = 0; z < grid.z; ++z) {
    for (uint32_t y = 0; y < grid.y; ++y) {
      for (uint32_t x = 0; x < grid.x; ++x) {
        b.place.block = {x, y, z};
        // Shared memory of a new block holds whatever was there: no kernel may read before it
        // wrote.
        std::memset(SharedMemory(), 0xa5, shared);
        RunBlock();
      }
    }
  }
}

}  // namespace lode::cuda::emulated
