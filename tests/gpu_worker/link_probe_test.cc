// The probe of the pull lane's link: every node is measured, alone and beside readers, and the rates
// of nodes are joined by the time that an expert's pieces take.
#include "gpu_worker/link_probe.h"

#include <gtest/gtest.h>

#include "shared/model/model_source.h"
#include "tests/gpu_worker/fake_arenas.h"

namespace lode {
namespace {

TEST(LinkProbe, MeasuresEveryNodeAloneAndBesideReaders) {
  const auto source = ModelSource::Open("synth:layers=1,experts=8,pack=q2_0,vocab=512");
  ASSERT_TRUE(source.ok()) << source.status();
  auto device = CudaDevice::Create((*source)->config(), {.ordinal = 0, .context = 64});
  ASSERT_TRUE(device.ok()) << device.status();
  const FakeArenas fake(FakeShape{}, 3);
  const ArenaSet arenas(fake.layouts(), fake.data());
  for (const uint32_t threads : {0u, 2u}) {
    const auto rates = ProbeLinks(**device, arenas, threads);
    ASSERT_TRUE(rates.ok()) << rates.status();
    ASSERT_EQ(rates->size(), 3u);
    for (const LinkRates& r : *rates) {
      EXPECT_GT(r.idle, 0);
      EXPECT_GT(r.busy, 0);
      EXPECT_EQ(r.host > 0, threads > 0);
      EXPECT_TRUE(threads > 0 || r.idle == r.busy);
    }
  }
}

TEST(LinkProbe, AnExpertTakesAsLongAsItsPieces) {
  const LinkRates all = OverAllNodes({{.idle = 60, .busy = 30, .host = 10},
                                      {.idle = 20, .busy = 10, .host = 10}});
  EXPECT_DOUBLE_EQ(all.idle, 30);  // halves at 60 and at 20
  EXPECT_DOUBLE_EQ(all.busy, 15);
  EXPECT_DOUBLE_EQ(all.host, 10);
  EXPECT_EQ(OverAllNodes({{.idle = 60}, {}}).idle, 0);
  EXPECT_EQ(OverAllNodes({}).idle, 0);
}

}  // namespace
}  // namespace lode
