#include "shared/base/status.h"

#include <cerrno>
#include <system_error>

namespace lode {

Status ErrnoStatus(std::string what, int error_number) {
  what += ": " + std::generic_category().message(error_number);
  switch (error_number) {
    case ENOENT:
      return Status(StatusCode::kNotFound, what);
    case EACCES:
    case EPERM:
      return Status(StatusCode::kPermissionDenied, what);
    case ENOMEM:
    case ENOSPC:
    case EMFILE:
      return Status(StatusCode::kResourceExhausted, what);
    case EINVAL:
      return Status(StatusCode::kInvalidArgument, what);
    default:
      return Status(StatusCode::kUnavailable, what);
  }
}

}  // namespace lode
