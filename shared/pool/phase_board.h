// The board that the threads of a pool take their chunks from: one 64-bit word holds the phase's
// number, how many chunks it has and which one is next, and a claim is a compare-and-swap of the
// whole word. So a thread that wakes late, having read the word of a phase that is over, can
// neither take a chunk of the next phase nor run one with the function of an earlier one: its swap
// fails. A template on the atomic type, so that tests/shm walks through every interleaving.
//
// Roles: one caller opens a phase, takes chunks itself and waits until all are done; any number of
// threads take chunks. A phase is opened only after the one before it is done.
#pragma once

#include <atomic>
#include <cstdint>

#include "shared/shm/wait_word.h"

namespace lode {

template <template <class> class Atomic>
class PhaseBoard {
 public:
  class Next;
  using Fn = void (*)(void* context, uint32_t chunk, uint32_t thread, Next& next);
  static constexpr uint32_t kChunksMax = 0xffff;  // 16 bits of the claim word

  // Given to a chunk's function: which chunk its thread does next. Asking claims that chunk, so the
  // answer is certain, and a function that asks when its own work is nearly done costs the others
  // no choice worth having. Functions that do not ask have the chunk claimed when they return.
  class Next {
   public:
    static constexpr uint32_t kNone = UINT32_MAX;
    explicit Next(PhaseBoard* board) : board_(board) {}
    explicit Next(uint32_t known) : chunk_(known), claimed_(true) {}  // without a board
    // The same answer each time; kNone: no chunk of the phase is left.
    uint32_t Claim() {
      if (!claimed_) chunk_ = board_->ClaimAhead();
      claimed_ = true;
      return chunk_;
    }

   private:
    friend class PhaseBoard;
    PhaseBoard* board_ = nullptr;
    uint32_t chunk_ = kNone;
    bool claimed_ = false;
  };

  // Caller. REQUIRES 1 <= n_chunks <= kChunksMax, an epoch that differs from the last one.
  void Open(uint32_t epoch, uint32_t n_chunks, Fn fn, void* context) {
    // Relaxed: no thread holds a valid claim now, and the release of `claim_` below publishes all
    // three.
    fn_.store(reinterpret_cast<uint64_t>(fn), std::memory_order_relaxed);
    context_.store(reinterpret_cast<uint64_t>(context), std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    // Release: pairs with the acquire in TakeChunks.
    claim_.store(Claim(epoch, n_chunks, 0), std::memory_order_release);
  }

  // Any thread: runs chunks of the open phase until none is left to claim.
  void TakeChunks(uint32_t thread) {
    for (;;) {
      // Acquire: pairs with the release in Open: fn_ and context_.
      uint64_t claim = claim_.load(std::memory_order_acquire);
      if (NextOf(claim) >= Count(claim)) return;
      // These may belong to a later phase than `claim`; then the exchange below fails.
      const auto fn = reinterpret_cast<Fn>(fn_.load(std::memory_order_relaxed));
      void* const context = reinterpret_cast<void*>(context_.load(std::memory_order_relaxed));
      // Relaxed on success would do for the claim itself; acquire keeps the chunk's reads behind
      // it.
      if (!claim_.compare_exchange_strong(claim, claim + 1, std::memory_order_acquire,
                                          std::memory_order_relaxed))
        continue;
      // And those that the function claimed ahead: while this thread holds one, the phase is open.
      for (uint32_t chunk = NextOf(claim); chunk != Next::kNone;) {
        Next next(this);
        fn(context, chunk, thread, next);
        chunk = next.chunk_;
        // acq_rel: gathers the writes of every earlier finisher; the last one hands them to the
        // caller through done_.
        if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == Count(claim))
          Publish(done_, claim >> 32);
      }
    }
  }

  // Epoch of the newest finished phase; its writer is whoever ended the last chunk (release), so
  // the caller's acquire of it sees every write of the phase.
  BasicWaitWord<Atomic>& done() { return done_; }
  uint32_t finished() const { return finished_.load(std::memory_order_relaxed); }  // for messages

 private:
  static constexpr uint64_t Claim(uint32_t epoch, uint32_t count, uint32_t next) {
    return (static_cast<uint64_t>(epoch) << 32) | (static_cast<uint64_t>(count) << 16) | next;
  }
  static constexpr uint32_t Count(uint64_t claim) {
    return static_cast<uint32_t>(claim >> 16) & 0xffffu;
  }
  static constexpr uint32_t NextOf(uint64_t claim) {
    return static_cast<uint32_t>(claim) & 0xffffu;
  }
  // REQUIRES that this thread holds an unfinished chunk: then the phase cannot change.
  uint32_t ClaimAhead() {
    uint64_t claim = claim_.load(std::memory_order_acquire);
    while (NextOf(claim) < Count(claim)) {
      // Acquire keeps the chunk's reads behind its claim.
      if (claim_.compare_exchange_strong(claim, claim + 1, std::memory_order_acquire,
                                         std::memory_order_acquire))
        return NextOf(claim);
    }
    return Next::kNone;
  }

  // epoch (32 bits) | number of chunks (16) | next chunk (16). Writers: the caller between phases,
  // claiming threads inside them.
  alignas(64) Atomic<uint64_t> claim_{};
  // The phase's function and its argument, as integers. Writer: the caller, before `claim_`. A
  // claim that succeeds proves that the phase was still the same when they were read.
  Atomic<uint64_t> fn_{}, context_{};
  alignas(64) Atomic<uint32_t> finished_{};  // chunks of the open phase that are done
  alignas(64) BasicWaitWord<Atomic> done_{};
};

}  // namespace lode
