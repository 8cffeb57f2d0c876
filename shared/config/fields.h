// The one list of options. Parsing of the TOML file and of flags, validation, --help, docs/config.md and
// deploy/config/lode.example.toml derive from these rows. One row per option, ever.
#pragma once

#include <cstdint>
#include <string>

namespace lode {

// X(section, name, C++ type, default, minimum, maximum, restart needed, help)
//   restart needed = false: `lode tune` changes it while the daemon runs (daemon/tuning.h).
//   flag: --name with '-' for '_'; TOML: [section] name. bool and string options ignore minimum and maximum.
#define LODE_OPTIONS(X)                                                                                                  \
  X(model, model, std::string, "", 0, 0, true, "GGUF file, any shard, folder, or synth:... description")                 \
  X(model, mtp, std::string, "", 0, 0, true, "separate draft-head (MTP) file; empty = the block in the model's own file, if it has one") \
  X(model, mtp_norm, std::string, "full", 0, 0, true, "norm of the draft head's residual input: full (one over all streams) or stream") \
  X(model, context, uint32_t, 0, 0, 1048576, true, "tokens a request may use; 0 = the model's own, bounded by kv_tokens") \
  X(model, kv_type, std::string, "q8", 0, 0, true, "KV cache storage: q8 (8 bits, a scale per cell and head), f16 or f32") \
  X(model, float_reference, bool, false, 0, 0, true, "unquantised activations, cpu device only: slow, for comparisons")  \
  X(device, device, std::string, "auto", 0, 0, true, "cpu, cuda or auto (cuda when a usable GPU is found)")              \
  X(device, device_threads, uint32_t, 0, 0, 256, true, "threads of the cpu device; 0 = chosen from the cores")           \
  X(device, vram_budget, uint64_t, 0, 0, 1ull << 50, false, "cpu: bytes for expert slots, 0 = half of the experts; cuda: device memory in all, 0 = what is free") \
  X(device, isa, std::string, "auto", 0, 0, true, "kernel table; auto is the best one this CPU runs") \
  X(drafts, draft_source, std::string, "both", 0, 0, true, "guesses that windows verify: none, head (the model's draft head), lookup (repetitions) or both") \
  X(drafts, draft_max, uint32_t, 7, 0, 7, true, "most drafts of a sequence in one window when a request names no number; 0 = none") \
  X(drafts, draft_min_p, double, 0.5, 0, 1, true, "the draft head guesses on while it is at least this sure")              \
  X(drafts, draft_coupled, bool, false, 0, 0, true, "the draft head draws with the request's own sampling and random numbers") \
  X(drafts, draft_policy, std::string, "learned", 0, 0, true, "how many drafts: learned (as many as pay) or fixed (all there are)") \
  X(drafts, draft_vocab, std::string, "", 0, 0, true, "file of the token ids that the draft head may guess (lines 'id' or 'id count'); empty = all") \
  X(drafts, draft_vocab_top, uint32_t, 0, 0, 1048576, true, "of draft_vocab, only this many tokens with the highest counts; 0 = all") \
  X(experts, expert_slots, uint32_t, 0, 0, 262144, true, "at most this many experts in VRAM, within vram_budget; 0 = no such limit") \
  X(experts, cpu_workers, uint32_t, 0, 0, 16, true, "CPU expert workers; 0 = one per NUMA node")                         \
  X(experts, cpu_threads, uint32_t, 0, 0, 256, true, "threads of each CPU worker; 0 = chosen from cores and cpuset; a CPU quota is never exceeded") \
  X(experts, pull_share, double, -1, -1, 1, false, "share of misses pulled over PCIe by policy fixed; -1 = by pack")     \
  X(experts, split_policy, std::string, "auto", 0, 0, false, "lane split: fixed, balanced (by the lanes' learned costs), or auto (balanced on cuda without a pull_share)")         \
  X(experts, pull_staging, uint64_t, 64ull << 20, 0, 16ull << 30, true, "cuda: device memory for pulled experts on their way; 0 = kernels read them straight from host memory") \
  X(experts, tier_policy, std::string, "decayed_lfu", 0, 0, false, "VRAM tier: static or decayed_lfu")                   \
  X(experts, profile, std::string, "", 0, 0, true, "expert ranking file; empty = spread evenly over layers")             \
  X(experts, save_profile, std::string, "", 0, 0, true, "the learned ranking is written here at an orderly stop; may be the file of profile, which then need not exist yet") \
  X(experts, lock_memory, bool, true, 0, 0, true, "mlock the expert arenas and the memory of the cpu device (a warning names memlock when it is too small)") \
  X(experts, huge_pages, std::string, "transparent", 0, 0, true, "none, transparent or hugetlb")                         \
  X(serving, sequences, uint32_t, 8, 1, 64, true, "sequences served at once")                                            \
  X(serving, queue, uint32_t, 64, 0, 65536, true, "requests that may wait; more are refused")                           \
  X(serving, kv_tokens, uint32_t, 16384, 256, 67108864, true, "KV cells in all, shared by the sequences")                \
  X(serving, prompt_rows, uint32_t, 8, 1, 8, false, "prompt rows of one sequence in one window")                         \
  X(serving, max_tokens, uint32_t, 4096, 1, 1048576, true, "default answer limit when a request names none")            \
  X(serving, slow_client_seconds, double, 30, 0.1, 86400, true, "a client that does not read for this long is cancelled") \
  X(serving, request_seconds, double, 0, 0, 604800, true, "longest life of a request; 0 = none")                        \
  X(api, socket, std::string, "", 0, 0, true, "unix socket of the client API; empty = <runtime_dir>/lode.sock")          \
  X(api, socket_group, std::string, "lode", 0, 0, true, "group of the client socket (mode 0660); ignored when it does not exist") \
  X(api, listen, std::string, "127.0.0.1:7070", 0, 0, true, "TCP address of the client API, loopback only; empty = none") \
  X(api, metrics_listen, std::string, "127.0.0.1:7071", 0, 0, true, "address of the Prometheus endpoint; empty = none")  \
  X(api, template_seconds, double, 2, 0.05, 60, true, "deadline of rendering a chat template")                          \
  X(process, runtime_dir, std::string, "", 0, 0, true, "folder for sockets, mode 0700; empty = $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/lode or /tmp/lode-UID") \
  X(process, worker_dir, std::string, "", 0, 0, true, "where the worker binaries are; empty = beside loded")             \
  X(process, wait_ms, uint32_t, 200, 1, 3600000, true, "a wait for a worker ends after this long without its progress")  \
  X(process, wait_max_ms, uint32_t, 500, 1, 3600000, true, "and after this long in any case")                            \
  X(process, spin_us, int32_t, -1, -1, 1000000, true, "busy polling before sleeping; -1 = 0 when threads outnumber cores, else 200") \
  X(process, load_seconds, double, 120, 1, 86400, true, "loading ends with an error after this long without progress")   \
  X(process, watchdog_seconds, double, 60, 1, 86400, true, "no window progress for this long: report, restart the stuck part") \
  X(process, log_level, std::string, "info", 0, 0, true, "trace, debug, info, warn or error")

struct Options {
#define LODE_X(section, name, type, def, min, max, restart, help) type name = def;
  LODE_OPTIONS(LODE_X)
#undef LODE_X
};

}  // namespace lode
