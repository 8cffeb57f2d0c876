// The program version, from CMake's project(). Daemon and workers compare it when a worker registers: processes of two
// installations never serve one model together.
#pragma once

namespace lode {
inline constexpr char kVersion[] = LODE_VERSION;
}  // namespace lode
