// See wait_model.h.
#include "tests/shm/wait_model.h"

namespace lode::test {
namespace {
constexpr size_t kStackBytes = 128 * 1024;
constexpr uint64_t kStepsMax = 20000;  // of one run; more is a livelock
constexpr size_t kBufferMax = 4;  // stores; real buffers are longer, but no test has more in flight
}  // namespace

Model* Model::current = nullptr;

void Model::Entry() {
  Model* model = current;
  Thread& self = *model->threads_[model->running_];
  self.body();
  model->Step();  // the last accesses may still be in the buffer while others run
  model->Drain();
  self.done = true;
  swapcontext(&self.context, &model->scheduler_);
}

void Model::Step() {
  Thread& self = *threads_[running_];
  swapcontext(&self.context, &scheduler_);
}

void Model::Buffer(std::function<void()> store, const void* address, uint64_t value) {
  Thread& self = *threads_[running_];
  self.buffer.push_back({std::move(store), address, value});
  if (self.buffer.size() > kBufferMax) {
    self.buffer.front().apply();
    self.buffer.pop_front();
  }
}

bool Model::Forward(const void* address, uint64_t* value) const {
  const Thread& self = *threads_[running_];
  for (auto it = self.buffer.rbegin(); it != self.buffer.rend(); ++it) {
    if (it->address != address) continue;
    *value = it->value;
    return true;
  }
  return false;
}

void Model::Drain() {
  Thread& self = *threads_[running_];
  for (Store& s : self.buffer) s.apply();
  self.buffer.clear();
}

void Model::Sleep(const void* address) {
  threads_[running_]->asleep = address;
  Step();
}

void Model::Wake(const void* address) {
  for (auto& t : threads_) {
    if (t->asleep == address) t->asleep = nullptr;
  }
}

void Model::Fail(const std::string& what) {
  if (failure_.empty()) failure_ = what;
}

std::vector<uint32_t> Model::Actions() const {
  std::vector<uint32_t> actions;
  const auto runnable = [](const Thread& t) { return !t.done && t.asleep == nullptr; };
  if (runnable(*threads_[running_])) actions.push_back(2 * running_);
  for (uint32_t t = 0; t < threads_.size(); ++t) {
    if (t != running_ && runnable(*threads_[t])) actions.push_back(2 * t);
  }
  for (uint32_t t = 0; t < threads_.size(); ++t) {
    if (!threads_[t]->buffer.empty()) actions.push_back(2 * t + 1);
  }
  return actions;
}

uint32_t Model::Choose(const std::vector<uint32_t>& actions) {
  // Out of deviations: one way only.
  const uint32_t count = deviations_ >= deviations_max_ ? 1 : static_cast<uint32_t>(actions.size());
  if (at_ == path_.size()) path_.push_back({0, count});
  const uint32_t index = path_[at_++].index;
  if (index != 0) ++deviations_;
  return actions[index];
}

void Model::RunOnce(std::vector<std::function<void()>> bodies) {
  threads_.clear();
  for (auto& body : bodies) {
    auto t = std::make_unique<Thread>();
    t->stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
    t->body = std::move(body);
    getcontext(&t->context);
    t->context.uc_stack.ss_sp = t->stack.get();
    t->context.uc_stack.ss_size = kStackBytes;
    t->context.uc_link = nullptr;
    makecontext(&t->context, &Model::Entry, 0);
    threads_.push_back(std::move(t));
  }
  at_ = 0;
  deviations_ = 0;
  running_ = 0;
  for (steps_ = 0; failure_.empty(); ++steps_) {
    const std::vector<uint32_t> actions = Actions();
    bool all_done = true;
    for (const auto& t : threads_) all_done &= t->done;
    if (all_done) return;
    if (actions.empty()) return Fail("everybody sleeps: a wake was lost");
    if (steps_ > kStepsMax) return Fail("no end: livelock");
    const uint32_t action = Choose(actions);
    Thread& t = *threads_[action / 2];
    if (action % 2 == 1) {
      t.buffer.front().apply();
      t.buffer.pop_front();
      continue;
    }
    running_ = action / 2;
    swapcontext(&scheduler_, &t.context);
  }
}

Model::Result Model::Explore(uint32_t deviations_max, uint64_t runs_max,
                             const std::function<std::vector<std::function<void()>>()>& setup) {
  Model model;
  current = &model;
  model.deviations_max_ = deviations_max;
  Result result;
  while (result.runs < runs_max) {
    ++result.runs;
    model.RunOnce(setup());
    if (!model.failure_.empty()) {
      result.failure = model.failure_;
      break;
    }
    // Next path: the last choice that has an untried alternative.
    while (!model.path_.empty() && model.path_.back().index + 1 >= model.path_.back().count)
      model.path_.pop_back();
    if (model.path_.empty()) break;
    ++model.path_.back().index;
  }
  current = nullptr;
  return result;
}

}  // namespace lode::test
