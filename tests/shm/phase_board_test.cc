// The board of the thread pool under every interleaving (up to a number of preemptions, with store
// buffers): a thread that wakes late, in the middle of whatever phase, runs no chunk twice, none of
// a phase that is over, none with another phase's function, and no phase ends before its chunks
// did. The same exploration finds the bug of a board that keeps the number of chunks outside the
// claim word. Labels: unit.
#include "shared/pool/phase_board.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "shared/shm/wait_word_impl.h"
#include "tests/shm/wait_model.h"

namespace lode::test {

// Found by argument-dependent look-up from PhaseBoard.
template <template <class> class A>
void Publish(BasicWaitWord<A>& word, uint64_t value) {
  PublishWith<ModelPlatform>(word, value);
}

namespace {

constexpr uint64_t kNever = UINT64_MAX;
constexpr uint64_t kRunsMax = 600000;

// What a phase's function finds behind its context pointer.
struct Phase {
  uint32_t epoch;
  uint32_t runs[3] = {};
  bool over = false;
};
// Chunk 0 and 2 claim ahead, chunk 1 does not.
template <class Next>
void Run(void* context, uint32_t chunk, uint32_t, Next& next) {
  Phase& phase = *static_cast<Phase*>(context);
  if (phase.over) Model::current->Fail("a chunk of a phase that is over");
  if (chunk >= 3 || ++phase.runs[chunk] > 1) Model::current->Fail("a chunk ran twice");
  if (chunk % 2 == 1) return;
  const uint32_t ahead = next.Claim();
  if (ahead != next.Claim()) Model::current->Fail("two answers");
  if (ahead != Next::kNone && (ahead <= chunk || phase.runs[ahead] > 0))
    Model::current->Fail("claimed ahead what another thread has");
}

// A short phase, then a longer one, as a caller runs them; `late` threads look at the board a few
// times at any moments.
template <class Board>
Model::Result Explore(uint32_t deviations, uint32_t late) {
  return Model::Explore(deviations, kRunsMax, [late] {
    struct Run2 {
      Board board;
      Phase phases[2] = {{1}, {2}};
    };
    auto run = std::make_shared<Run2>();
    std::vector<std::function<void()>> threads;
    threads.push_back([run] {
      const uint32_t counts[2] = {1, 3};
      for (uint32_t p = 0; p < 2; ++p) {
        run->board.Open(p + 1, counts[p], Run<typename Board::Next>, &run->phases[p]);
        run->board.TakeChunks(0);
        for (uint64_t seen = p; seen != p + 1;)
          seen = WaitChangeWith<ModelPlatform>(run->board.done(), seen, {0, kNever});
        for (uint32_t c = 0; c < counts[p]; ++c) {
          if (run->phases[p].runs[c] != 1) Model::current->Fail("a phase ended too early");
        }
        run->phases[p].over = true;
      }
    });
    for (uint32_t i = 0; i < late; ++i) {
      threads.push_back([run] {
        run->board.TakeChunks(1);
        run->board.TakeChunks(1);
      });
    }
    return threads;
  });
}

TEST(PhaseBoard, LateThreadsTakeNothingThatIsNotTheirs) {
  const Model::Result one = Explore<PhaseBoard<StrongAtomic>>(3, 1);
  EXPECT_EQ(one.failure, "");
  EXPECT_GT(one.runs, 1000u);
  EXPECT_LT(one.runs, kRunsMax) << "the exploration must be complete";
  const Model::Result two = Explore<PhaseBoard<StrongAtomic>>(2, 2);
  EXPECT_EQ(two.failure, "");
  EXPECT_LT(two.runs, kRunsMax);
}

// The board as it is often written: a counter of the next chunk, the number of chunks beside it.
class CountOutside {
 public:
  using Fn = PhaseBoard<StrongAtomic>::Fn;
  using Next = PhaseBoard<StrongAtomic>::Next;
  void Open(uint32_t epoch, uint32_t n_chunks, Fn fn, void* context) {
    epoch_.store(epoch, std::memory_order_relaxed);
    fn_.store(reinterpret_cast<uint64_t>(fn), std::memory_order_relaxed);
    context_.store(reinterpret_cast<uint64_t>(context), std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    count_.store(n_chunks, std::memory_order_seq_cst);
    next_.store(0, std::memory_order_seq_cst);
  }
  void TakeChunks(uint32_t thread) {
    for (;;) {
      const auto fn = reinterpret_cast<Fn>(fn_.load(std::memory_order_acquire));
      void* const context = reinterpret_cast<void*>(context_.load(std::memory_order_acquire));
      const uint32_t count = count_.load(std::memory_order_acquire);
      const uint32_t chunk = next_.fetch_add(1, std::memory_order_acq_rel);
      if (chunk >= count) return;
      Next next(Next::kNone);
      fn(context, chunk, thread, next);
      if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 ==
          count_.load(std::memory_order_acquire))
        Publish(done_, epoch_.load(std::memory_order_acquire));
    }
  }
  BasicWaitWord<StrongAtomic>& done() { return done_; }

 private:
  StrongAtomic<uint64_t> fn_{}, context_{};
  StrongAtomic<uint32_t> epoch_{}, count_{}, next_{}, finished_{};
  BasicWaitWord<StrongAtomic> done_{};
};

TEST(PhaseBoard, FindsTheLateThreadOfACountOutsideTheWord) {
  EXPECT_NE(Explore<CountOutside>(3, 1).failure, "");
}

}  // namespace
}  // namespace lode::test
