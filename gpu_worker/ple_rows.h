// Rows of the hashed n-gram table: which rows a token needs (a pure function of token ids), and a
// thread that reads them while the layers before the n-gram layer compute. The table (28.8 GB for
// the flagship) is never loaded. Thread: Start and Await belong to the worker loop; the read runs
// on the object's own thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "kernels/formats.h"
#include "shared/base/status.h"
#include "shared/model/model_source.h"

namespace lode {

// rows[head] of the n-gram layer `ple`, PleHeads() of them, each below ple_rows. context[i] is the
// token i places back, -1 before the sequence; ngram_size entries. A segment end (ple_eos) hides
// everything before it, except when it is the current token.
void PleRowNumbers(const ModelConfig& config, const PleConfig& ple,
                   std::span<const int32_t> context, uint64_t* rows);

class PleReader {
 public:
  // `source` outlives the reader. FailedPrecondition when the table's type cannot be computed with.
  static StatusOr<std::unique_ptr<PleReader>> Create(const ModelSource& source);
  ~PleReader();

  // contexts: [row][ngram_size]. Begins reading the rows of all n-gram layers.
  void Start(std::span<const int32_t> contexts, uint32_t n_rows);
  // Waits for the read. Further calls return at once. DeadlineExceeded when the disk does not
  // answer.
  Status Await();
  // [row][heads][row_bytes] of one n-gram layer, after Await.
  const uint8_t* rows(uint32_t ple_index) const {
    return bytes_.data() + ple_index * layer_stride_;
  }
  size_t layer_bytes(uint32_t n_rows) const {
    return n_rows * config_.PleHeads() * table_->row_bytes();
  }
  Format format() const { return FormatOf(table_->type); }

 private:
  PleReader(const ModelSource& source, const TensorInfo* table);
  void ThreadMain();

  const ModelSource& source_;
  const ModelConfig& config_;
  const TensorInfo* table_;
  size_t layer_stride_;
  std::vector<uint64_t>
      numbers_;  // [n-gram layer][row][head], the loop's between Await and Start, else the thread's
  std::vector<uint8_t> bytes_;  // likewise
  uint32_t n_rows_ = 0;         // likewise

  std::mutex mutex_;
  std::condition_variable changed_;
  bool pending_ = false, stop_ = false;  // guarded by mutex_
  Status result_;                        // guarded by mutex_
  std::thread thread_;
};

}  // namespace lode
