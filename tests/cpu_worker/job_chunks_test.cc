// Cutting a job: every own row of every expert in exactly one chunk, gate and up before down, whole
// groups of rows, pieces that shrink towards the end, a list that stays within its bound. Labels:
// unit.
#include "cpu_worker/job_chunks.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/kernel_table.h"
#include "shared/pool/node_pool.h"

namespace lode {
namespace {

// The flagship in Q2_0, one worker.
constexpr JobShape kFlagship = {.n_experts = 13,
                                .width_rows = 640,
                                .hidden_rows = 2560,
                                .gate_up_row_bytes = 2 * 720,
                                .down_row_bytes = 180,
                                .threads = 14};

uint64_t Bytes(const JobShape& s, const JobChunk& c) {
  return uint64_t{c.rows.size()} * (c.down ? s.down_row_bytes : s.gate_up_row_bytes);
}

void ExpectCovers(const JobShape& s, const JobChunks& chunks) {
  uint32_t i = 0;
  for (const bool down : {false, true}) {
    for (uint32_t j = 0; j < s.n_experts; ++j) {
      const uint32_t rows = down ? s.hidden_rows : s.width_rows;
      uint32_t next = 0;
      do {
        ASSERT_LT(i, chunks.size());
        const JobChunk c = chunks[i++];
        ASSERT_EQ(c.down, down);
        ASSERT_EQ(c.entry, j);
        ASSERT_EQ(c.rows.begin, next);
        ASSERT_TRUE(c.rows.end > next || rows == 0);
        ASSERT_TRUE(c.rows.end % kRowGranule == 0 || c.rows.end == rows);
        next = c.rows.end;
      } while (next < rows);
      ASSERT_EQ(next, rows);
    }
  }
  EXPECT_EQ(i, chunks.size());
  EXPECT_LE(i, NodePool::kChunksMax);
}

TEST(JobChunks, EveryRowOnceInEveryShape) {
  JobChunks chunks;
  for (const uint32_t n_experts : {1u, 2u, 5u, 13u, 80u}) {
    for (const uint32_t threads : {1u, 2u, 14u, 1024u}) {
      for (const uint32_t rows : {0u, 1u, 15u, 16u, 17u, 213u, 640u, 2560u, 100'000u}) {
        for (const uint32_t row_bytes : {2u, 180u, 20'480u}) {
          const JobShape s = {n_experts, rows, rows / 2 + 3, 2 * row_bytes, row_bytes, threads};
          for (const ChunkRule& rule : {ChunkRule{}, ChunkRule{1, 4, 1}, ChunkRule{100, 1, 1}}) {
            chunks.Cut(s, rule);
            ExpectCovers(s, chunks);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(JobChunks, AWorkerWithoutRowsHasAnEmptyChunkPerExpert) {
  JobChunks chunks;
  chunks.Cut({.n_experts = 3, .threads = 2}, {});
  ASSERT_EQ(chunks.size(), 6u);
  for (uint32_t i = 0; i < chunks.size(); ++i) EXPECT_EQ(chunks[i].rows.size(), 0u);
}

// The last thread to end has little more than the smallest piece left; the first ones are large.
TEST(JobChunks, PiecesShrinkTowardsTheEnd) {
  const ChunkRule rule;
  JobChunks chunks;
  chunks.Cut(kFlagship, rule);
  const uint64_t first = Bytes(kFlagship, chunks[0]);
  const uint64_t last = Bytes(kFlagship, chunks[chunks.size() - 1]);
  EXPECT_GE(first, 150'000u);
  EXPECT_LE(last, 2 * rule.bytes_min);
  // Of what is left when a piece is claimed, no piece is more than a thread's fair part.
  uint64_t left = 0;
  for (uint32_t i = 0; i < chunks.size(); ++i) left += Bytes(kFlagship, chunks[i]);
  for (uint32_t i = 0; i < chunks.size(); ++i) {
    const JobChunk c = chunks[i];
    const uint64_t bytes = Bytes(kFlagship, c);
    EXPECT_LE(bytes, std::max<uint64_t>(left / kFlagship.threads, 2 * rule.bytes_min))
        << "entry " << c.entry << " rows " << c.rows.begin;
    left -= bytes;
  }
}

// One expert for many threads: as many pieces as there are groups of rows, if they are large.
TEST(JobChunks, OneExpertIsSharedByAllThreads) {
  JobShape s = kFlagship;
  s.n_experts = 1;
  JobChunks chunks;
  chunks.Cut(s, {});
  EXPECT_GE(chunks.GateUpPieces(0), 2 * s.threads);
  EXPECT_GE(chunks.size() - chunks.GateUpPieces(0), 2 * s.threads);
}

}  // namespace
}  // namespace lode
