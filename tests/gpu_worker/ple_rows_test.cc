// The n-gram hash against rows computed independently from the published constants of the flagship
// model, for a sequence with a segment end in the middle.
#include "gpu_worker/ple_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lode {
namespace {

ModelConfig Flagship() {
  ModelConfig c;
  c.ngram_size = 3;
  c.heads_per_ngram = 8;
  c.ple_eos = 248044;
  PleConfig p;
  p.multipliers = {23703573157769, 20109073645365, 8052911324071};
  p.head_sizes = {20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
                  20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171};
  uint64_t offset = 0;
  for (uint64_t size : p.head_sizes) {
    p.head_offsets.push_back(offset);
    offset += size;
  }
  c.ple.push_back(p);
  return c;
}

std::vector<uint64_t> Rows(const ModelConfig& config, const std::vector<int32_t>& context) {
  std::vector<uint64_t> rows(16);
  PleRowNumbers(config, config.ple[0], context, rows.data());
  return rows;
}

TEST(PleRows, MatchTheGoldenSequence) {
  const ModelConfig c = Flagship();
  using ::testing::ElementsAre;
  EXPECT_THAT(Rows(c, {3, -1, -1}),
              ElementsAre(5318554, 26730617, 51177670, 61593418, 94411889, 119482836, 127837362,
                          140373362, 175277381, 199452204, 217186100, 238911097, 253868456,
                          270051525, 282384981, 306094789));
  EXPECT_THAT(Rows(c, {4, 3, -1}),
              ElementsAre(11040574, 24501192, 51231614, 76654297, 92730965, 111423247, 139461694,
                          156846261, 172354500, 199909878, 213875332, 221704937, 259257811,
                          277170064, 283220709, 314073144));
  EXPECT_THAT(Rows(c, {248044, 4, 3}),
              ElementsAre(11415239, 27851578, 50479349, 71096940, 99069428, 116000989, 132280215,
                          148965400, 177284249, 185027128, 216077513, 222255373, 247238985,
                          273280895, 295530149, 308539434));
  EXPECT_THAT(Rows(c, {5, 248044, 4}),
              ElementsAre(15389869, 39778609, 55713969, 62213332, 88817728, 118483999, 133731511,
                          155458159, 179763390, 197956758, 205378969, 220499474, 242466248,
                          265658744, 293662119, 315720898));
  EXPECT_THAT(Rows(c, {6, 5, 248044}),
              ElementsAre(15567690, 35687509, 55747620, 67831959, 83904455, 115928743, 123965091,
                          148013673, 164414634, 193473829, 212527239, 232037623, 240342494,
                          269007074, 298641997, 307414745));
  EXPECT_THAT(Rows(c, {7, 6, 5}),
              ElementsAre(9319853, 32980418, 54810932, 61373850, 95570932, 100303321, 137402047,
                          146866965, 160487518, 192851935, 200610520, 228493582, 254676383,
                          260859079, 296253588, 313224935));
}

TEST(PleRows, ASegmentEndHidesEverythingBefore) {
  const ModelConfig c = Flagship();
  EXPECT_EQ(Rows(c, {5, 248044, 4}), Rows(c, {5, 248044, 9}));
  EXPECT_EQ(Rows(c, {5, 248044, 4}), Rows(c, {5, -1, -1}));
  EXPECT_NE(Rows(c, {248044, 4, 3}), Rows(c, {248044, -1, -1}));
}

}  // namespace
}  // namespace lode
