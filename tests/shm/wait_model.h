// A model of shared memory for tests: every atomic access is a scheduling point, stores that are
// not seq_cst wait in a store buffer of their thread (as on x86), futexes sleep until woken. A run
// is a sequence of choices; Explore walks through all sequences with at most a given number of
// deviations from "let the current thread go on". A run in which everybody sleeps is a lost wake.
// Threads are fibers of one OS thread, so a run is deterministic.
#pragma once

#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lode::test {

class Model {
 public:
  static Model* current;

  struct Result {
    uint64_t runs = 0;
    std::string failure;  // empty: none found
  };
  // Each call of `setup` makes the threads of one run. Stops at the first failure, or after
  // runs_max runs.
  static Result Explore(uint32_t deviations_max, uint64_t runs_max,
                        const std::function<std::vector<std::function<void()>>()>& setup);

  void Step();  // scheduling point of the running thread
  void Buffer(std::function<void()> store, const void* address, uint64_t value);
  bool Forward(const void* address,
               uint64_t* value) const;  // newest buffered store of this thread to the address
  void Drain();                         // the running thread's buffer goes to memory
  void Sleep(const void* address);      // until Wake of the same address
  void Wake(const void* address);
  void Fail(const std::string& what);

 private:
  struct Store {
    std::function<void()> apply;
    const void* address;
    uint64_t value;
  };
  struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    std::function<void()> body;
    std::deque<Store> buffer;
    const void* asleep = nullptr;
    bool done = false;
  };
  static void Entry();
  void RunOnce(std::vector<std::function<void()>> bodies);
  // Actions: 2*t = let thread t run one step, 2*t+1 = flush thread t's oldest store. The first one
  // is the default.
  std::vector<uint32_t> Actions() const;
  uint32_t Choose(const std::vector<uint32_t>& actions);

  std::vector<std::unique_ptr<Thread>> threads_;
  ucontext_t scheduler_;
  uint32_t running_ = 0;
  uint64_t steps_ = 0;
  std::string failure_;
  // The path of this run: chosen index and number of actions at every choice. Replayed up to
  // `fixed_`.
  struct Choice {
    uint32_t index, count;
  };
  std::vector<Choice> path_;
  size_t at_ = 0;
  uint32_t deviations_ = 0, deviations_max_ = 0;
};

// std::atomic in the model. kWeaken turns every seq_cst store into a release store: a mutation that
// tests must notice.
template <class T, bool kWeaken = false>
class ModelAtomic {
 public:
  ModelAtomic() = default;
  T load(std::memory_order) const {
    Model::current->Step();
    uint64_t buffered = 0;
    return Model::current->Forward(this, &buffered) ? static_cast<T>(buffered) : value_;
  }
  void store(T value, std::memory_order order) {
    Model::current->Step();
    Model::current->Buffer([this, value] { value_ = value; }, this, value);
    if (order == std::memory_order_seq_cst && !kWeaken) Model::current->Drain();
  }
  T fetch_add(T n, std::memory_order) { return Modify(n); }
  T fetch_sub(T n, std::memory_order) { return Modify(static_cast<T>(0 - n)); }
  // A locked instruction as well; in the model it fails only when the value differs.
  bool compare_exchange_strong(T& expected, T desired, std::memory_order, std::memory_order) {
    Model::current->Step();
    Model::current->Drain();
    const bool same = value_ == expected;
    if (same)
      value_ = desired;
    else
      expected = value_;
    return same;
  }
  T raw() const { return value_; }

 private:
  T Modify(T n) {  // a locked instruction: drains, then acts on memory
    Model::current->Step();
    Model::current->Drain();
    const T before = value_;
    value_ = static_cast<T>(value_ + n);
    return before;
  }
  T value_ = 0;
};
template <class T>
using StrongAtomic = ModelAtomic<T, false>;
template <class T>
using WeakAtomic = ModelAtomic<T, true>;

struct ModelPlatform {
  template <class A>
  static void FutexWait(A& word, uint32_t expected, uint64_t) {
    Model::current->Step();
    Model::current->Drain();
    if (word.raw() == expected) Model::current->Sleep(&word);
  }
  template <class A>
  static void FutexWakeAll(A& word) {
    Model::current->Step();
    Model::current->Drain();
    Model::current->Wake(&word);
  }
  static uint64_t NowNs() { return 0; }
  static void Pause() {}
};

}  // namespace lode::test
