// Taking a job out of shared memory: one copy, then every field checked against the model and the
// window, before any of it is used as an index. A job comes from a peer of the same user; the
// checks guard against bugs, torn writes and mixed-up builds, and a job that fails them is answered
// with JobStatus::kBadJob. Pure but for the copy.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "shared/wire/arena_layout.h"
#include "shared/wire/exchange_layout.h"
#include "shared/wire/expert_job.h"

namespace lode {

// Copies header and entries of `in` (shared memory) once. False when the copied n_experts is out of
// range (entries are not copied).
bool CopyJob(const ExpertJob& in, ExpertJob* out);

struct JobLimits {
  const ArenaLayout* layout;
  ExchangeShape shape;
  uint32_t me;  // worker index
  const IsaChoice* tables;
  uint32_t n_tables;
};
// nullptr when the copied job is sound and belongs to `tag`; otherwise what is wrong with it, for
// the log.
const char* CheckJob(const ExpertJob& job, uint64_t tag, const JobLimits& limits);

// The ActForms bit that a weight format reads.
constexpr uint32_t ActFormOf(Format format, bool float_reference) {
  if (float_reference) return kActF32;
  switch (Info(format).act_block_len) {
    case 32:
      return kActQ32;
    case 64:
      return kActQ64;
    case 256:
      return kActQ256;
    default:
      return kActF32;
  }
}

}  // namespace lode
