// Where a test finds the demo model and the worker binaries, and on which device its engine runs:
// compiled in for the build tree, overridden by the environment when test programs are carried to a
// machine with a card (tests/device/run.sh). Test processes only.
#pragma once

#include <cstdlib>
#include <string>

namespace lode {

inline std::string FromEnvironment(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

// Folder with tests/models in it.
inline std::string TestSources() { return FromEnvironment("LODE_TEST_SOURCES", LODE_SOURCE_DIR); }
// Folder with the worker binaries.
inline std::string TestBinaries() {
  return FromEnvironment("LODE_TEST_BINARIES", LODE_BINARY_DIR "/bin");
}
// "cpu" or "cuda".
inline std::string TestDevice() { return FromEnvironment("LODE_TEST_DEVICE", "cpu"); }

}  // namespace lode
