#include "shared/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>

#include <cstdlib>

namespace lode {

void InitLog(const std::string& process, const std::string& level) {
  auto logger = spdlog::stderr_logger_mt(process);
  const bool journal = std::getenv("JOURNAL_STREAM") != nullptr;
  logger->set_pattern(journal ? "%l %n[%P] %v" : "%Y-%m-%dT%H:%M:%S.%e %l %n[%P] %v");
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(logger);
}

}  // namespace lode
