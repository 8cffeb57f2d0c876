// The tier's bookkeeping. One queue of copies, first in first out; the upload thread owns a slot's
// bytes from the moment the copy may start until it is landed, the windows own them before and
// after.
#include "gpu_worker/expert_tier.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "shared/base/check.h"
#include "shared/base/fault.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

// A resize waits for the one copy that is running: a few megabytes from RAM to RAM. Longer than
// this is our bug.
constexpr uint64_t kCopySecondsMax = 10;

std::vector<uint16_t> SlotCounts(const Placement& placement) {
  std::vector<uint16_t> counts;
  for (const std::vector<uint16_t>& ids : placement.resident)
    counts.push_back(static_cast<uint16_t>(ids.size()));
  return counts;
}

}  // namespace

ExpertTier::ExpertTier(const ArenaSet& arenas, std::unique_ptr<SlotMemory> memory)
    : arenas_(arenas),
      layers_(arenas.layers()),
      experts_(arenas.experts()),
      memory_(std::move(memory)),
      slots_(layers_, 0) {
  const size_t pairs = static_cast<size_t>(layers_) * experts_;
  residency_.assign(pairs, kNotResident);
  states_.assign(pairs, TierState::kAbsent);
  counts_.assign(pairs, 0.0f);
  lookups_.assign(pairs, 0.0);
}

ExpertTier::~ExpertTier() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

StatusOr<std::unique_ptr<ExpertTier>> ExpertTier::Create(const ArenaSet& arenas,
                                                         uint64_t budget_bytes,
                                                         std::span<const RankedExpert> ranking,
                                                         const ProgressFn& progress,
                                                         std::unique_ptr<SlotMemory> memory) {
  if (memory == nullptr) {
    LODE_ASSIGN_OR_RETURN(memory, MakeHostSlots(arenas));
  }
  std::unique_ptr<ExpertTier> tier(new ExpertTier(arenas, std::move(memory)));
  tier->order_ = PlacementOrder(ranking, tier->layers_, tier->experts_);
  tier->budget_bytes_ = std::min(budget_bytes, tier->memory_->capacity());
  const Placement placement =
      PlaceExperts(tier->order_, arenas.all_slot_bytes(), tier->budget_bytes_);
  tier->memory_->SetSlots(SlotCounts(placement));
  uint64_t done = 0;
  for (uint32_t layer = 0; layer < tier->layers_; ++layer) {
    const std::vector<uint16_t>& ids = placement.resident[layer];
    tier->slots_[layer] = static_cast<uint16_t>(ids.size());
    for (uint16_t slot = 0; slot < ids.size(); ++slot) {
      tier->memory_->Copy(layer, ids[slot], slot);
      tier->SetResident(static_cast<uint16_t>(layer), ids[slot], slot);
      done += arenas.slot_bytes(layer);
    }
    tier->memory_->Trim(layer, tier->slots_[layer]);
    if (progress) progress(done, placement.bytes);
  }
  tier->thread_ = std::thread([t = tier.get()] { t->UploadThread(); });
  return tier;
}

void ExpertTier::SetResident(uint16_t layer, uint16_t expert, uint16_t slot) {
  residency_[Index(layer, expert)] = slot;
  states_[Index(layer, expert)] = TierState::kResident;
  ++table_version_;
  ++resident_experts_;
  resident_bytes_ += arenas_.slot_bytes(layer);
}

void ExpertTier::Evict(uint16_t layer, uint16_t expert) {
  residency_[Index(layer, expert)] = kNotResident;
  states_[Index(layer, expert)] = TierState::kAbsent;
  ++table_version_;
  --resident_experts_;
  resident_bytes_ -= arenas_.slot_bytes(layer);
}

void ExpertTier::Count(uint32_t layer, const RoutedRow* rows, uint32_t n_rows,
                       uint32_t experts_used) {
  for (uint32_t r = 0; r < n_rows; ++r) {
    for (uint32_t o = 0; o < experts_used; ++o) {
      counts_[Index(layer, rows[r].ids[o])] += 1.0f;
      lookups_[Index(layer, rows[r].ids[o])] += 1.0;
    }
  }
}

void ExpertTier::Queue(const Upload& upload) {
  states_[Index(upload.layer, upload.expert)] = TierState::kUploading;
  ++outstanding_;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(upload);
  }
  changed_.notify_all();
}

uint64_t ExpertTier::Land() {
  std::vector<Upload> landed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    landed.swap(landed_);
  }
  uint64_t bytes = 0;
  for (const Upload& u : landed) {
    SetResident(u.layer, u.expert, u.slot);
    bytes += arenas_.slot_bytes(u.layer);
    --outstanding_;
  }
  return bytes;
}

TierStep ExpertTier::Border(TierPolicy policy, uint64_t budget_bytes) {
  TierStep step;
  step.upload_bytes = Land();
  budget_bytes = std::min(budget_bytes, memory_->capacity());
  if (budget_bytes != budget_bytes_ && Resize(budget_bytes)) budget_bytes_ = budget_bytes;
  if (windows_in_round_ >= params_.round_windows) {
    step.swaps = RunRound(policy);
    windows_in_round_ = 0;
  }
  ++windows_begun_;
  ++windows_in_round_;
  LODE_FAULT("gpu_worker.tier_border");
  return step;
}

void ExpertTier::WindowDone() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++windows_done_;
    LODE_CHECK(windows_done_ <= windows_begun_, "{} windows done of {} begun", windows_done_,
               windows_begun_);
  }
  changed_.notify_all();
}

void ExpertTier::PlanAhead() {
  if (windows_in_round_ >= params_.round_windows && !planned_) planned_ = Plan();
}

// `static` learns nothing, but its counters decay all the same: a later switch of the policy finds
// them in range. A plan made ahead still fits: landing since then concerns none of its experts.
uint64_t ExpertTier::RunRound(TierPolicy policy) {
  uint64_t swaps = 0;
  if (policy == TierPolicy::kDecayedLfu && outstanding_ < params_.swaps_max) {
    const std::vector<Swap> plan = planned_ ? std::move(*planned_) : Plan();
    // Slow copies slow the policy down; slots never pile up empty.
    const size_t n = std::min<size_t>(plan.size(), params_.swaps_max - outstanding_);
    for (const Swap& s : std::span(plan).first(n)) {
      const uint16_t slot = residency_[Index(s.layer, s.victim)];
      Evict(s.layer, s.victim);
      Queue({s.layer, s.newcomer, slot, windows_begun_});
      ++swaps;
    }
  }
  planned_.reset();
  DecayCounts(counts_, params_);
  return swaps;
}

// Drops copies that have not started and waits for the one that has.
void ExpertTier::CancelUploads() {
  std::deque<Upload> dropped;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    dropped.swap(queue_);
    const bool idle =
        changed_.wait_for(lock, std::chrono::seconds(kCopySecondsMax), [&] { return !busy_; });
    LODE_CHECK(idle, "expert tier: one copy took longer than {} s", kCopySecondsMax);
  }
  for (const Upload& u : dropped) {
    states_[Index(u.layer, u.expert)] = TierState::kAbsent;
    --outstanding_;
  }
  Land();
}

// A changed budget: residents stay, hottest first, as far as they fit; what becomes free is filled
// with the hottest others. Only when no window is running, since slots' contents move; otherwise
// the next border tries again.
bool ExpertTier::Resize(uint64_t budget_bytes) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (windows_done_ != windows_begun_) return false;
  }
  CancelUploads();
  planned_.reset();
  std::vector<uint8_t> resident(states_.size());
  for (size_t i = 0; i < states_.size(); ++i) resident[i] = states_[i] == TierState::kResident;
  const std::vector<ExpertRef> order = ResizeOrder(order_, counts_, resident, experts_);
  const Placement placement = PlaceExperts(order, arenas_.all_slot_bytes(), budget_bytes);
  if (!memory_->SetSlots(SlotCounts(placement))) {
    // Slots lie elsewhere now: whoever stays is copied again like a newcomer.
    for (uint32_t layer = 0; layer < layers_; ++layer) {
      for (uint32_t e = 0; e < experts_; ++e) {
        if (residency_[Index(layer, e)] != kNotResident)
          Evict(static_cast<uint16_t>(layer), static_cast<uint16_t>(e));
      }
    }
  }
  ++table_version_;
  for (uint32_t layer = 0; layer < layers_; ++layer)
    ResizeLayer(static_cast<uint16_t>(layer), placement.resident[layer]);
  return true;
}

void ExpertTier::ResizeLayer(uint16_t layer, const std::vector<uint16_t>& wanted) {
  const uint16_t slots = static_cast<uint16_t>(wanted.size());
  std::vector<uint8_t> keep(experts_, 0), taken(experts_, 0);
  for (const uint16_t expert : wanted) keep[expert] = 1;
  for (uint32_t e = 0; e < experts_; ++e) {
    const uint16_t slot = residency_[Index(layer, e)];
    if (slot == kNotResident) continue;
    if (!keep[e]) {
      Evict(layer, static_cast<uint16_t>(e));
    } else if (slot < slots) {
      taken[slot] = 1;
    }
  }
  uint16_t free = 0;
  const auto next_free = [&] {
    while (taken[free]) ++free;
    taken[free] = 1;
    return free;
  };
  // Residents first, newcomers after: both need slots below the new count.
  for (const uint16_t expert : wanted) {
    uint16_t& slot = residency_[Index(layer, expert)];
    if (slot == kNotResident || slot < slots) continue;
    const uint16_t to = next_free();
    memory_->Move(layer, slot, to);
    slot = to;
  }
  for (const uint16_t expert : wanted) {
    if (residency_[Index(layer, expert)] == kNotResident)
      Queue({layer, expert, next_free(), windows_begun_});
  }
  memory_->Trim(layer, slots);
  slots_[layer] = slots;
}

uint64_t ExpertTier::slot_bytes_total() const {
  uint64_t bytes = 0;
  for (uint32_t layer = 0; layer < layers_; ++layer)
    bytes += arenas_.slot_bytes(layer) * slots_[layer];
  return bytes;
}

void ExpertTier::UploadThread() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] {
      return stop_ || (!hold_ && !queue_.empty() && windows_done_ >= queue_.front().after);
    });
    if (stop_) return;
    const Upload upload = queue_.front();
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    memory_->Copy(upload.layer, upload.expert, upload.slot);
    LODE_FAULT("gpu_worker.tier_uploaded");
    lock.lock();
    landed_.push_back(upload);
    busy_ = false;
    changed_.notify_all();
  }
}

bool ExpertTier::WaitUploads(uint64_t deadline_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto quiet = [&] {
    return !busy_ && (queue_.empty() || hold_ || windows_done_ < queue_.front().after);
  };
  for (uint64_t now = NowNs(); !quiet() && now < deadline_ns; now = NowNs()) {
    changed_.wait_for(lock, std::chrono::nanoseconds(deadline_ns - now));
  }
  return quiet();
}

void ExpertTier::HoldUploads(bool hold) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hold_ = hold;
  }
  changed_.notify_all();
}

Status ExpertTier::WriteProfile(const std::string& path) const {
  const std::string temporary = path + ".new";
  std::ofstream out(temporary, std::ios::trunc);
  out << RankingText(lookups_, layers_, experts_);
  out.close();
  if (!out || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return ErrnoStatus(fmt::format("writing the expert profile {}", path), errno);
  }
  return OkStatus();
}

}  // namespace lode
