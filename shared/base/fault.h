// Named fault points: the places where a test may let a process die, stop or stall, one at each
// step of every protocol. Builds without LODE_TEST_HOOKS contain none of it. Armed by the
// environment at the first hit, or by ArmFaults:
//
//   LODE_FAULT = spec[,spec...]      spec = [scope/]name[:n][:action]
//     n       the hit that triggers, counted per process from 1 (default 1)
//     action  kill (SIGKILL to itself, the default), exit (status 86), stop (SIGSTOP), abort,
//     sleep=MS (every hit from the n-th on) scope   only in processes with this scope, e.g. "cpu1"
//     or "cpu1.gen2" (SetFaultScope): a restarted worker inherits the
//             environment and must not die again
//
// Thread-safe. A point that is not armed costs one relaxed load.
#pragma once

#include <atomic>
#include <string>

#include "shared/base/status.h"

namespace lode {

// "ROLE INDEX . gen GENERATION", e.g. "cpu1.gen2". Call before the first fault point.
void SetFaultScope(const std::string& scope);
// Replaces what is armed; counts start again. An empty spec disarms.
Status ArmFaults(const std::string& spec);

namespace fault_internal {
extern std::atomic<bool> maybe_armed;  // false once it is known that nothing is armed
void Hit(const char* name);
}  // namespace fault_internal

}  // namespace lode

#if defined(LODE_TEST_HOOKS)
#define LODE_FAULT(name)                                                     \
  do {                                                                       \
    if (::lode::fault_internal::maybe_armed.load(std::memory_order_relaxed)) \
      ::lode::fault_internal::Hit(name);                                     \
  } while (false)
#else
#define LODE_FAULT(name) \
  do {                   \
  } while (false)
#endif
