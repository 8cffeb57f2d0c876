// The program's version (from the top CMakeLists.txt): printed by --version, reported by Status, and equal in the daemon and its
// workers, or they part.
#pragma once

namespace lode {
inline constexpr const char* kVersion = LODE_VERSION;
}  // namespace lode
