// The program's version: printed by --version, reported by Status, and equal in the daemon and its workers or they part.
#pragma once

namespace lode {
inline constexpr const char* kVersion = "0.1.0";
}  // namespace lode
