// See job_check.h. Conditions in the order of the fields.
#include "cpu_worker/job_check.h"

#include <cstddef>
#include <cstring>

namespace lode {

bool CopyJob(const ExpertJob& in, ExpertJob* out) {
  std::memcpy(out, &in, offsetof(ExpertJob, experts));
  // The copy may be of a job that is being overwritten: only the copied count is used from here on.
  if (out->n_experts > kJobExpertsMax) return false;
  std::memcpy(out->experts, in.experts, out->n_experts * sizeof(JobExpert));
  return true;
}

const char* CheckJob(const ExpertJob& job, uint64_t tag, const JobLimits& limits) {
  if (job.tag != tag || tag == 0) return "its tag is not the bell's";
  if (job.layer >= limits.layout->layers.size()) return "its layer does not exist";
  if ((tag & 0xffff) != job.layer + 1) return "its layer is not the tag's";
  if (job.n_experts > kJobExpertsMax) return "it has too many experts";
  if (job.float_reference > 1) return "its float_reference is neither 0 nor 1";
  if (job.n_experts == 0) return nullptr;  // nothing else is read
  if (job.n_rows == 0 || job.n_rows > kWindowRowsMax) return "its number of rows is out of range";
  const uint32_t isa = job.isa[limits.me];
  if (isa >= limits.n_tables || !limits.tables[isa].supported)
    return "its instruction set is unknown or not supported here";
  const LayerExperts& layer = limits.layout->layers[job.layer];
  const bool reference = job.float_reference != 0;
  const uint32_t needed = ActFormOf(layer.gate, reference) | ActFormOf(layer.up, reference);
  if ((job.act_forms & needed) != needed)
    return "it lacks a form of the activations that the layer's weights need";
  uint32_t orders_taken[kWindowRowsMax] =
      {};  // bit per place: two experts must not write one vector
  static_assert(kExpertsUsedMax <= 32);
  for (uint32_t j = 0; j < job.n_experts; ++j) {
    const JobExpert& e = job.experts[j];
    if (e.expert >= limits.layout->experts) return "an expert id is out of range";
    if (e.rows == 0 || (e.rows >> job.n_rows) != 0)
      return "an expert's row mask is empty or names a row that is not there";
    for (uint32_t row = 0; row < job.n_rows; ++row) {
      if ((e.rows >> row & 1) == 0) continue;
      const uint32_t order = e.order[row];
      if (order >= limits.shape.experts_used)
        return "an expert's place in the routing order is out of range";
      if ((orders_taken[row] >> order & 1) != 0)
        return "two experts have one place in a row's routing order";
      orders_taken[row] |= 1u << order;
    }
  }
  return nullptr;
}

}  // namespace lode
