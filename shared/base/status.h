// Errors of the world (files, flags, peers, requests) travel as absl::Status, by value, through every function of ours.
// One sentence: what is wrong, where, and what to do. Exceptions cross no function of ours; our own bugs are LODE_CHECKs.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lode {

using absl::Status;
using absl::StatusCode;
template <typename T>
using StatusOr = absl::StatusOr<T>;

inline Status OkStatus() { return absl::OkStatus(); }

// Debian's Abseil has its own string_view: this is the one place where the message crosses over.
template <typename... Args>
Status Error(StatusCode code, fmt::format_string<Args...> format, Args&&... args) {
  return Status(code, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
Status InvalidArgument(fmt::format_string<Args...> format, Args&&... args) {
  return Error(StatusCode::kInvalidArgument, format, std::forward<Args>(args)...);
}
template <typename... Args>
Status NotFound(fmt::format_string<Args...> format, Args&&... args) {
  return Error(StatusCode::kNotFound, format, std::forward<Args>(args)...);
}
template <typename... Args>
Status FailedPrecondition(fmt::format_string<Args...> format, Args&&... args) {
  return Error(StatusCode::kFailedPrecondition, format, std::forward<Args>(args)...);
}
template <typename... Args>
Status ResourceExhausted(fmt::format_string<Args...> format, Args&&... args) {
  return Error(StatusCode::kResourceExhausted, format, std::forward<Args>(args)...);
}
template <typename... Args>
Status Unavailable(fmt::format_string<Args...> format, Args&&... args) {
  return Error(StatusCode::kUnavailable, format, std::forward<Args>(args)...);
}
template <typename... Args>
Status DeadlineExceeded(fmt::format_string<Args...> format, Args&&... args) {
  return Error(StatusCode::kDeadlineExceeded, format, std::forward<Args>(args)...);
}
template <typename... Args>
Status Internal(fmt::format_string<Args...> format, Args&&... args) {
  return Error(StatusCode::kInternal, format, std::forward<Args>(args)...);
}
// errno as a Status: "what: strerror(errno)".
Status ErrnoStatus(std::string what, int error_number);

inline std::string Message(const Status& status) { return std::string(status.message()); }

}  // namespace lode

#define LODE_RETURN_IF_ERROR(expr)                    \
  do {                                                \
    ::lode::Status lode_status_ = (expr);             \
    if (!lode_status_.ok()) return lode_status_;      \
  } while (false)

#define LODE_CONCAT_INNER(a, b) a##b
#define LODE_CONCAT(a, b) LODE_CONCAT_INNER(a, b)
#define LODE_ASSIGN_OR_RETURN(lhs, expr) LODE_ASSIGN_OR_RETURN_INNER(LODE_CONCAT(lode_or_, __LINE__), lhs, expr)
#define LODE_ASSIGN_OR_RETURN_INNER(tmp, lhs, expr) \
  auto tmp = (expr);                                \
  if (!tmp.ok()) return tmp.status();               \
  lhs = std::move(tmp).value()
