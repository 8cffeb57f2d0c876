#include "shared/base/check.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace lode {

void CheckFailed(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "lode[%d] CHECK failed at %s:%d: %s: %s\n", static_cast<int>(getpid()), file, line, condition,
               message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace lode
