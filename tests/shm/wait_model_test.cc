// Every interleaving (up to a number of preemptions, with store buffers) of the wait word and the
// ring: no wake is lost, no item is lost, repeated or torn. The same exploration finds the bug when
// one memory order is weakened. Labels: unit.
#include "tests/shm/wait_model.h"

#include <gtest/gtest.h>

#include "shared/shm/ring.h"
#include "shared/shm/wait_word_impl.h"

namespace lode::test {

// Found by argument-dependent look-up from SpscRing.
template <template <class> class A>
void Publish(BasicWaitWord<A>& word, uint64_t value) {
  PublishWith<ModelPlatform>(word, value);
}
template <template <class> class A>
uint64_t WaitChange(BasicWaitWord<A>& word, uint64_t seen, const WaitBudget& budget) {
  return WaitChangeWith<ModelPlatform>(word, seen, budget);
}

namespace {

constexpr uint64_t kNever = UINT64_MAX;
constexpr uint32_t kPreemptions = 4;
constexpr uint64_t kRunsMax = 400000;  // bounds the time of a test; a run is some 10 us

template <class Word>
Model::Result ExploreWaitWord(uint32_t n_waiters, uint32_t preemptions) {
  return Model::Explore(preemptions, kRunsMax, [n_waiters] {
    auto word = std::make_shared<Word>();
    auto payload = std::make_shared<uint64_t>(0);
    std::vector<std::function<void()>> threads;
    for (uint32_t i = 0; i < n_waiters; ++i) {
      threads.push_back([word, payload] {
        uint64_t seen = 0;
        while (seen != 2) {
          const uint64_t now = WaitChangeWith<ModelPlatform>(*word, seen, {0, kNever});
          if (now != seen && now < seen) Model::current->Fail("the value went back");
          seen = now;
        }
        if (*payload != 7) Model::current->Fail("the payload came after the value");
      });
    }
    threads.push_back([word, payload] {
      PublishWith<ModelPlatform>(*word, 1);
      *payload = 7;
      PublishWith<ModelPlatform>(*word, 2);
    });
    return threads;
  });
}

TEST(WaitModel, NoWakeIsLost) {
  const Model::Result one = ExploreWaitWord<BasicWaitWord<StrongAtomic>>(1, kPreemptions);
  EXPECT_EQ(one.failure, "");
  EXPECT_GT(one.runs, 1000u);
  EXPECT_LT(one.runs, kRunsMax) << "the exploration must be complete";
  const Model::Result two = ExploreWaitWord<BasicWaitWord<StrongAtomic>>(2, 3);
  EXPECT_EQ(two.failure, "");
}

// Release instead of seq_cst in Publish: the store may still sit in the buffer when the publisher
// looks for sleepers.
TEST(WaitModel, FindsTheLostWakeOfAWeakerStore) {
  EXPECT_EQ(ExploreWaitWord<BasicWaitWord<WeakAtomic>>(1, kPreemptions).failure,
            "everybody sleeps: a wake was lost");
}

// A waiter that reads the ticket after its last look at the value.
uint64_t WaitWithLateTicket(BasicWaitWord<StrongAtomic>& word, uint64_t seen) {
  word.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint64_t value = word.value.load(std::memory_order_seq_cst);
  const uint32_t ticket = word.futex.load(std::memory_order_acquire);
  if (value == seen) ModelPlatform::FutexWait(word.futex, ticket, kNever);
  word.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return word.value.load(std::memory_order_acquire);
}
TEST(WaitModel, FindsTheLostWakeOfALateTicket) {
  const Model::Result result = Model::Explore(kPreemptions, kRunsMax, [] {
    auto word = std::make_shared<BasicWaitWord<StrongAtomic>>();
    return std::vector<std::function<void()>>{[word] {
                                                for (uint64_t seen = 0; seen != 1;)
                                                  seen = WaitWithLateTicket(*word, seen);
                                              },
                                              [word] { PublishWith<ModelPlatform>(*word, 1); }};
  });
  EXPECT_EQ(result.failure, "everybody sleeps: a wake was lost");
}

// WakeAll alone brings a sleeper back with the old value; one that was not asleep yet is woken by
// the publication.
TEST(WaitModel, WakeAllReturnsTheOldValue) {
  uint32_t old_values = 0;
  const Model::Result result = Model::Explore(kPreemptions, kRunsMax, [&old_values] {
    auto word = std::make_shared<BasicWaitWord<StrongAtomic>>();
    return std::vector<std::function<void()>>{
        [word, &old_values] {
          if (WaitChangeWith<ModelPlatform>(*word, 0, {0, kNever}) == 0) ++old_values;
        },
        [word] {
          WakeAllWith<ModelPlatform>(*word);
          PublishWith<ModelPlatform>(*word, 1);
        }};
  });
  EXPECT_EQ(result.failure, "");
  EXPECT_GT(old_values, 0u);
  EXPECT_LT(old_values, result.runs);
}

// Items are two words that must agree; the ring holds two, four are sent, so that it is full and
// empty on the way.
struct Item {
  uint64_t a, b;
};
template <class Word>
Model::Result ExploreRing(uint32_t deviations) {
  return Model::Explore(deviations, kRunsMax, [] {
    auto ring = std::make_shared<SpscRing<Item, 2, Word>>();
    constexpr uint64_t kItems = 4;
    return std::vector<std::function<void()>>{
        [ring] {
          for (uint64_t i = 1; i <= kItems; ++i) {
            for (;;) {
              const uint64_t seen = ring->tail.value.load(std::memory_order_acquire);
              if (ring->TryPush({i, ~i})) break;
              WaitChange(ring->tail, seen, {0, kNever});
            }
          }
        },
        [ring] {
          for (uint64_t i = 1; i <= kItems; ++i) {
            Item item = {};
            if (!ring->Pop(&item, {0, kNever})) Model::current->Fail("Pop gave up");
            if (item.a != i || item.b != ~i)
              Model::current->Fail("an item was lost, repeated or torn");
          }
        }};
  });
}
TEST(RingModel, EveryItemOnceInOrder) {
  const Model::Result result = ExploreRing<BasicWaitWord<StrongAtomic>>(2);
  EXPECT_EQ(result.failure, "");
  EXPECT_GT(result.runs, 1000u);
}
TEST(RingModel, FindsTheWeakerStore) {
  EXPECT_NE(ExploreRing<BasicWaitWord<WeakAtomic>>(3).failure, "");
}

}  // namespace
}  // namespace lode::test
