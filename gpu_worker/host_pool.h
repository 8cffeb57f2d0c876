// What the expert lanes and the sampler need from whoever owns the threads: one blocking parallel
// loop. The cpu device's pool implements it; SerialPool is for tests and tools.
#pragma once

#include <cstdint>
#include <type_traits>

namespace lode {

class HostPool {
 public:
  virtual ~HostPool() = default;
  // Calls fn(arg, i) once for every i in [0, n), on any thread, and returns when all have returned.
  // Not reentrant.
  virtual void Run(uint32_t n, void (*fn)(void* arg, uint32_t i), void* arg) = 0;
};

class SerialPool : public HostPool {
 public:
  void Run(uint32_t n, void (*fn)(void* arg, uint32_t i), void* arg) override {
    for (uint32_t i = 0; i < n; ++i) fn(arg, i);
  }
};

// The same for a lambda; nothing is allocated.
template <class F>
void ParallelFor(HostPool& pool, uint32_t n, F&& body) {
  pool.Run(
      n, [](void* arg, uint32_t i) { (*static_cast<std::remove_reference_t<F>*>(arg))(i); }, &body);
}

}  // namespace lode
