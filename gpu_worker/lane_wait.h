// The bounded wait for the CPU workers' acknowledgements, one look at a time: pure logic for both
// compilers. On the device one warp looks (cuda_lanes.cu); tests drive it with made-up clocks and
// words. Deadlines nest (docs/design/failure-model.md): the workers' own waits end first, then this
// one, then the daemon's. Step 8 of the life of a token.
#pragma once

#include <cstdint>

#include "gpu_worker/lane_types.h"
#include "kernels/canonical.h"
#include "shared/wire/expert_job.h"
#include "shared/wire/window_result.h"

namespace lode::cuda {

// How a window ended on the device; status 0 (kOk) until something fails. The first failure stays.
struct LaneFault {
  uint32_t status;  // WindowStatus
  WindowError error;
};

// One worker's line as one look sees it.
struct WorkerLook {
  uint64_t ack, progress;
};

struct WaitState {
  uint64_t begin_ns, moved_ns, progress;
  bool started;
};

enum class WaitVerdict : uint32_t { kWait = 0, kAnswered = 1, kFailed = 2 };

LODE_FN void SetFault(WindowStatus status, uint32_t layer, uint32_t row, uint32_t worker,
                      uint32_t detail, LaneFault* fault) {
  fault->status = static_cast<uint32_t>(status);
  fault->error.layer = layer;
  fault->error.row = row;
  fault->error.worker = worker;
  fault->error.detail = detail;
}

// The abort word comes first, then the answer, then the two deadlines.
LODE_FN WaitVerdict LookAtWorker(const WorkerLook& look, uint64_t abort_window, uint64_t window,
                                 uint64_t tag, uint64_t now_ns, uint64_t wait_ns,
                                 uint64_t wait_max_ns, uint32_t layer, uint32_t worker,
                                 WaitState* state, LaneFault* fault) {
  if (!state->started) *state = {now_ns, now_ns, look.progress, true};
  LaneError error = LaneError::kAbortWord;
  if (abort_window < window) {
    if (look.ack == tag) return WaitVerdict::kAnswered;
    if (look.progress != state->progress) {
      state->progress = look.progress;
      state->moved_ns = now_ns;
    }
    if (now_ns - state->begin_ns >= wait_max_ns) {
      error = LaneError::kTooLong;
    } else if (now_ns - state->moved_ns >= wait_ns) {
      error = LaneError::kNoProgress;
    } else {
      return WaitVerdict::kWait;
    }
  }
  SetFault(WindowStatus::kAborted, layer, 0, worker, static_cast<uint32_t>(error), fault);
  return WaitVerdict::kFailed;
}

// What an answered worker says about its job; true when all is well. REQUIRES: status and error_row
// were read behind the acquire of its ack.
LODE_FN bool JudgeAnswer(uint32_t job_status, uint32_t error_row, uint32_t layer, uint32_t worker,
                         LaneFault* fault) {
  const auto aborted = [&](uint32_t row, LaneError error) {
    SetFault(WindowStatus::kAborted, layer, row, worker, static_cast<uint32_t>(error), fault);
  };
  switch (static_cast<JobStatus>(job_status)) {
    case JobStatus::kOk:
      return true;
    case JobStatus::kNotFinite:
      SetFault(WindowStatus::kNotFinite, layer,
               error_row < kWindowRowsMax ? error_row : kWindowRowsMax - 1, worker, 0, fault);
      return false;
    case JobStatus::kPeerTimeout:
      aborted(error_row, LaneError::kPeerTimeout);
      return false;
    case JobStatus::kAborted:
      aborted(0, LaneError::kAbortWord);
      return false;
    case JobStatus::kBadJob:
      break;
  }
  aborted(error_row, LaneError::kBadJob);
  return false;
}

}  // namespace lode::cuda
