// The n-gram hash and its reader thread: see ple_rows.h. Formula: docs/design/model.md.
#include "gpu_worker/ple_rows.h"

#include <chrono>

#include "shared/base/check.h"
#include "shared/base/limits.h"

namespace lode {
namespace {

// The model source's own reads end with an error well before this; it only bounds a bug.
constexpr std::chrono::seconds kAwaitMax{120};

}  // namespace

void PleRowNumbers(const ModelConfig& config, const PleConfig& ple,
                   std::span<const int32_t> context, uint64_t* rows) {
  const uint64_t eos = config.ple_eos;
  uint64_t hash =
      static_cast<uint64_t>(context[0]) * ple.multipliers[0];  // products and sums wrap modulo 2^64
  bool cut = false;
  for (uint32_t n = 1; n < config.ngram_size; ++n) {
    cut = cut || context[n] < 0 || static_cast<uint64_t>(context[n]) == eos;
    hash ^= (cut ? eos : static_cast<uint64_t>(context[n])) * ple.multipliers[n];
    // Heads of the (n+1)-grams.
    for (uint32_t h = 0; h < config.heads_per_ngram; ++h) {
      const uint32_t head = (n - 1) * config.heads_per_ngram + h;
      rows[head] = hash % ple.head_sizes[head] + ple.head_offsets[head];
    }
  }
}

StatusOr<std::unique_ptr<PleReader>> PleReader::Create(const ModelSource& source) {
  const TensorInfo* table = source.Find("per_layer_token_embd.weight");
  if (table == nullptr)
    return NotFound("the model has no n-gram table (per_layer_token_embd.weight)");
  if (FormatOf(table->type) == Format::kCount) {
    return FailedPrecondition(
        "the n-gram table has type {}, which this version cannot compute with",
        FindTensorType(static_cast<uint32_t>(table->type))->name);
  }
  return std::unique_ptr<PleReader>(new PleReader(source, table));
}

PleReader::PleReader(const ModelSource& source, const TensorInfo* table)
    : source_(source),
      config_(source.config()),
      table_(table),
      layer_stride_(kWindowRowsMax * config_.PleHeads() * table->row_bytes()),
      numbers_(config_.ple.size() * kWindowRowsMax * config_.PleHeads()),
      bytes_(config_.ple.size() * layer_stride_),
      thread_([this] { ThreadMain(); }) {}

PleReader::~PleReader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void PleReader::Start(std::span<const int32_t> contexts, uint32_t n_rows) {
  // An aborted window may have left before it needed its rows; their read ends first.
  Await().IgnoreError();
  const uint32_t heads = config_.PleHeads();
  n_rows_ = n_rows;
  for (size_t p = 0; p < config_.ple.size(); ++p) {
    for (uint32_t r = 0; r < n_rows; ++r) {
      PleRowNumbers(config_, config_.ple[p],
                    contexts.subspan(r * config_.ngram_size, config_.ngram_size),
                    &numbers_[(p * n_rows + r) * heads]);
    }
  }
  {
    const std::lock_guard lock(mutex_);
    LODE_CHECK(!pending_, "the last n-gram read has not ended");
    pending_ = true;
    result_ = OkStatus();
  }
  changed_.notify_all();  // without the lock: the woken thread would run into it at once
}

Status PleReader::Await() {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, kAwaitMax, [this] { return !pending_; })) {
    return DeadlineExceeded("rows of the n-gram table were not read within {} s",
                            kAwaitMax.count());
  }
  return result_;
}

void PleReader::ThreadMain() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return pending_ || stop_; });  // idle between windows
    if (stop_) return;
    lock.unlock();
    const uint32_t per_layer = n_rows_ * config_.PleHeads();
    Status status = OkStatus();
    for (size_t p = 0; p < config_.ple.size() && status.ok(); ++p) {
      status = source_.ReadScattered(*table_, std::span(numbers_).subspan(p * per_layer, per_layer),
                                     bytes_.data() + p * layer_stride_);
    }
    lock.lock();
    result_ = std::move(status);
    pending_ = false;
    changed_.notify_all();
  }
}

}  // namespace lode
