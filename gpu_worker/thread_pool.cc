// See thread_pool.h.
#include "gpu_worker/thread_pool.h"

#include "shared/base/check.h"

namespace lode {

ThreadPool::ThreadPool(uint32_t threads, uint32_t spin_ns, std::vector<uint32_t> cpus) {
  auto pool = NodePool::Start({std::max(1u, threads), std::move(cpus), spin_ns});
  LODE_CHECK(pool.ok(), "{}", Message(pool.status()));
  pool_ = std::move(*pool);
  pool_->SetAwake(true);  // spin_ns after every operation, then sleep
}

}  // namespace lode
