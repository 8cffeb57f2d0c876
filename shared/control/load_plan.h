// What travels over the control plane, as plain structs: the worker side never shows gRPC or
// protobuf to the engine. Fields and units are those of proto/lode/control/v1/control.proto.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lode {

enum class WorkerRole : uint32_t { kCpu = 1, kGpu = 2 };

struct LoadPlan {
  std::string model;           // path or synth: string
  std::string identity;        // as the daemon sees it; a worker that sees another fails
  uint32_t n_nodes = 1;        // CPU workers, 1..kCpuWorkersMax (checked on receipt)
  uint32_t threads = 0;        // of this worker's pool
  std::vector<uint32_t> cpus;  // to pin to, one per thread; empty: not pinned
  std::string isa;             // "auto" or a table name
  std::string kv_type;         // "q8", "f16", "f32"
  uint32_t kv_blocks = 0;
  uint32_t sequence_slots = 0;
  uint32_t context = 0;  // tokens
  uint64_t vram_budget_bytes = 0;
  uint64_t pull_staging_bytes = 0;  // of it, for pulled experts on their way; cuda only
  std::string profile;       // expert ranking file; empty: spread evenly
  std::string save_profile;  // where the learned one goes at an orderly stop; empty: nowhere
  uint32_t spin_us = 0;      // busy polling before sleeping
  uint32_t wait_ms = 0;      // bounded wait without progress of a worker
  uint32_t wait_max_ms = 0;  // bounded wait in all
  bool float_reference = false;
  bool draft_head = false;  // load one, if there is one
  std::string mtp;          // separate draft-head file; empty: the model's own block, if it has one
  bool mtp_full_width_norm = true;
  std::string draft_vocab;       // file of token ids the drafter may guess; empty: all
  uint32_t draft_vocab_top = 0;  // of the file, only the tokens with the highest counts; 0: all
  std::string device;  // "cpu" | "cuda"
  uint32_t device_index = 0;
  bool lock_memory = false;
  uint32_t huge_pages = 0;  // 0 none, 1 transparent when possible, 2 hugetlb
};

struct ReadyReport {
  std::string summary;  // one line for the log
  uint64_t memory_bytes = 0;
  std::map<std::string, std::string> facts;
};

}  // namespace lode
