// Headers of segments: what was initialised passes, every field that differs is refused with its
// name. Labels: unit.
#include "shared/wire/segment_headers.h"

#include <gtest/gtest.h>

#include "shared/wire/layout_hash.h"

namespace lode {
namespace {

const ExchangeShape kShape = {256, 64, 8, 2};

TEST(SegmentHeaders, Exchange) {
  auto s = *Segment::Create("exchange", ExchangeLayout{kShape}.bytes());
  EXPECT_FALSE(CheckExchange(*s, kShape).ok()) << "zero memory has no header";
  InitExchange(*s, kShape, 0);
  EXPECT_TRUE(CheckExchange(*s, kShape).ok());
  ExchangeShape other = kShape;
  other.n_workers = 1;
  EXPECT_FALSE(CheckExchange(*s, other).ok());
  other = kShape;
  other.hidden = 128;
  EXPECT_FALSE(CheckExchange(*s, other).ok());
  s->As<ExchangeHeader>()->layout_hash += 1;
  EXPECT_NE(Message(CheckExchange(*s, kShape)).find("another build"), std::string::npos);
  auto small = *Segment::Create("exchange", 4096);
  EXPECT_FALSE(CheckExchange(*small, kShape).ok());
}

TEST(SegmentHeaders, Window) {
  auto s = *Segment::Create("window", sizeof(WindowSegment));
  EXPECT_FALSE(CheckWindowSegment(*s, 3, 0, 8192).ok());
  InitWindowSegment(*s, 3, 0, 8192);
  EXPECT_TRUE(CheckWindowSegment(*s, 3, 0, 8192).ok());
  EXPECT_FALSE(CheckWindowSegment(*s, 4, 0, 8192).ok());
  EXPECT_FALSE(CheckWindowSegment(*s, 3, 1, 8192).ok());
  EXPECT_FALSE(CheckWindowSegment(*s, 3, 0, 8191).ok());
  auto small = *Segment::Create("window", sizeof(WindowSegment) - 4096);
  EXPECT_FALSE(CheckWindowSegment(*small, 3, 0, 8192).ok());
}

// Areas of the exchange do not overlap, at shapes with awkward numbers too.
TEST(SegmentHeaders, ExchangeAreasAreDisjoint) {
  for (const ExchangeShape& shape :
       {ExchangeShape{256, 64, 8, 2}, ExchangeShape{2560, 640, 10, 1}, ExchangeShape{96, 32, 4, 16},
        ExchangeShape{16384, 16384, 32, 16}}) {
    const ExchangeLayout l = {shape};
    size_t at = sizeof(ExchangeHeader);
    for (uint32_t parity : {0u, 1u}) {
      EXPECT_GE(l.acts_offset(parity), at);
      at = l.acts_offset(parity) + kWindowRowsMax * l.act_row_bytes();
    }
    for (uint32_t parity : {0u, 1u}) {
      EXPECT_GE(l.hidden_offset(parity), at);
      at = l.hidden_offset(parity) + l.vectors() * shape.expert_width * sizeof(float);
    }
    for (uint32_t parity : {0u, 1u}) {
      EXPECT_GE(l.result_offset(parity), at);
      at = l.result_offset(parity) + l.vectors() * shape.hidden * sizeof(float);
    }
    EXPECT_GE(l.bytes(), at);
    EXPECT_GE(l.form_offset(1), shape.hidden * sizeof(float));
    for (uint32_t form : {1u, 2u, 3u}) {
      const ActLayout a = {shape.hidden, form == 1 ? 32u : (form == 2 ? 64u : 256u)};
      if (shape.hidden % a.block_len != 0) continue;
      EXPECT_LE(l.form_offset(form) + a.bytes(), l.act_row_bytes()) << form;
    }
  }
}

}  // namespace
}  // namespace lode
