// LODE_CHECK: our own bug. Prints the condition and a message, then aborts this process; always on. The supervisor
// restarts a worker that ends so. LODE_DCHECK is for inner loops and is compiled out with NDEBUG.
#pragma once

#include <fmt/format.h>

#include <string>

namespace lode {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition, const std::string& message);
}  // namespace lode

#define LODE_CHECK(condition, ...)                                                               \
  do {                                                                                           \
    if (!(condition)) [[unlikely]]                                                               \
      ::lode::CheckFailed(__FILE__, __LINE__, #condition, ::fmt::format(__VA_ARGS__));           \
  } while (false)

#ifdef NDEBUG
#define LODE_DCHECK(condition, ...) \
  do {                              \
  } while (false)
#else
#define LODE_DCHECK(condition, ...) LODE_CHECK(condition, __VA_ARGS__)
#endif
