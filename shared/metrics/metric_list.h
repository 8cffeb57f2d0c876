// The one list of metrics: base units, `_total` on counters. The endpoint, docs/metrics.md and the tests derive from its rows;
// daemon/api/prometheus.cc fills each, and fails to compile when one has no source.
#pragma once

namespace lode {

// X(identifier, name, kind, labels, help)    kind: Counter, Gauge, Histogram; labels: comma-separated names, "" = none
#define LODE_METRICS(X)                                                                                                      \
  X(HitRate, "lode_hit_rate", Gauge, "device",                                                                               \
    "Distinct routed (layer, expert) pairs of a window found in VRAM / all, over the last 256 windows")                      \
  X(PcieShare, "lode_pcie_share", Gauge, "device",                                                                           \
    "Misses pulled over PCIe / all misses, over the last 256 windows")                                                       \
  X(Lookups, "lode_expert_lookups_total", Counter, "device,lane", "Distinct routed (layer, expert) pairs of windows, by lane") \
  X(LaneBytes, "lode_lane_bytes_total", Counter, "device,lane", "Bytes of expert weights read, by lane")                     \
  X(LaneSeconds, "lode_lane_seconds_total", Counter, "device,lane", "Busy time, by lane")                                    \
  X(StageSeconds, "lode_stage_seconds_total", Counter, "device,stage", "Time of timed windows, by stage")                    \
  X(WindowSeconds, "lode_window_seconds", Histogram, "device", "Time from publishing a window plan to taking its result")    \
  X(Windows, "lode_windows_total", Counter, "device,status",                                                                 \
    "Windows by how they ended: ok, aborted (relaunched), not_finite, bad_plan, lost (worker gone)")                         \
  X(WindowRows, "lode_window_rows_total", Counter, "device", "Rows of finished windows")                                     \
  X(TierSwaps, "lode_tier_swaps_total", Counter, "device", "Experts exchanged in the VRAM tier")                             \
  X(TierUploadBytes, "lode_tier_upload_bytes_total", Counter, "device", "Bytes uploaded into the VRAM tier")                 \
  X(ResidentExperts, "lode_resident_experts", Gauge, "device", "Experts in the VRAM tier")                                   \
  X(ResidentBytes, "lode_resident_bytes", Gauge, "device", "Bytes of the experts in the VRAM tier")                          \
  X(Requests, "lode_requests_total", Counter, "reason", "Finished requests by reason: stop, length, cancelled, error")       \
  X(RequestsRefused, "lode_requests_refused_total", Counter, "", "Requests refused before they were queued")                 \
  X(PromptTokens, "lode_prompt_tokens_total", Counter, "", "Prompt tokens processed")                                        \
  X(GeneratedTokens, "lode_generated_tokens_total", Counter, "", "Tokens generated")                                         \
  X(DraftedTokens, "lode_drafted_tokens_total", Counter, "source,depth", "Draft tokens offered to verify windows")           \
  X(AcceptedDrafts, "lode_accepted_draft_tokens_total", Counter, "source,depth", "Draft tokens that held")                   \
  X(SequenceWindows, "lode_sequence_windows_total", Counter, "", "Windows times sequences that got tokens of an answer from them") \
  X(TokensPerWindow, "lode_tokens_per_window", Gauge, "", "Tokens of an answer per window that gave it some, over the last 256 windows") \
  X(DraftSeconds, "lode_draft_seconds_total", Counter, "device", "Time of windows spent following and guessing by the draft head") \
  X(VerifySeconds, "lode_verify_seconds_total", Counter, "device", "Time of windows spent on everything else")               \
  X(TimeToFirstToken, "lode_time_to_first_token_seconds", Histogram, "", "Arrival of a request to its first token")          \
  X(TokenSeconds, "lode_token_seconds", Histogram, "", "Time between two tokens of one answer")                              \
  X(QueueSeconds, "lode_queue_seconds", Histogram, "", "Arrival of a request to its admission")                              \
  X(Queued, "lode_queued_requests", Gauge, "", "Requests that wait for a sequence slot")                                     \
  X(Running, "lode_running_sequences", Gauge, "", "Sequences with a slot")                                                   \
  X(KvBlocks, "lode_kv_blocks", Gauge, "", "KV blocks of 256 cells in all")                                                  \
  X(KvBlocksFree, "lode_kv_blocks_free", Gauge, "", "Free KV blocks")                                                        \
  X(WorkerRestarts, "lode_worker_restarts_total", Counter, "worker", "Restarts of each worker process")                      \
  X(WorkerUp, "lode_worker_up", Gauge, "worker", "1 while the worker is ready")                                              \
  X(SequencesRebuilt, "lode_sequences_rebuilt_total", Counter, "", "Sequences rebuilt from their tokens after a lost GPU worker") \
  X(Stalls, "lode_stalls_total", Counter, "", "Stall reports of the watchdog")                                               \
  X(ProgressAge, "lode_seconds_since_progress", Gauge, "", "Time since a window last finished; 0 before the first")          \
  X(Info, "lode_build_info", Gauge, "version,model,device", "Always 1; the labels say what runs")

}  // namespace lode
