// One-line structured log to stderr (journald adds time and unit): "LEVEL process[pid] message". spdlog does the work.
#pragma once

#include <spdlog/spdlog.h>

#include <string>

namespace lode {

// Call once at the start of main. `process` is the binary's name; `level` is one of trace debug info warn error.
// When stderr is not a terminal and JOURNAL_STREAM is set, time stamps are left to the journal.
void InitLog(const std::string& process, const std::string& level);

}  // namespace lode
