// The Prometheus endpoint: a page made from the engine's counters at every scrape, by the one
// metric list. No metric is declared anywhere else.
#pragma once

#include <memory>
#include <string>

#include "daemon/api/api.h"

namespace lode {

class MetricsServer {
 public:
  virtual ~MetricsServer() = default;
  virtual std::string address() const = 0;  // host:port as bound
};

// Binds `address` (loopback) and serves /metrics.
StatusOr<std::unique_ptr<MetricsServer>> StartMetrics(const std::string& address,
                                                      const ApiContext& context);

}  // namespace lode
