// Placing an arena: the order of the steps, policies for one and several NUMA nodes, and what is
// reported when the machine lacks something, on machines that a fake kernel plays; then on this
// machine, where the report must agree with what /proc says. Labels: unit.
#include "cpu_worker/page_placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "shared/shm/memory_lock.h"
#include "shared/shm/segment.h"

namespace lode {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr size_t kPages = 4;  // huge ones

// A kernel that does what the fields say and writes down what it was asked.
class FakeKernel : public PageSystem {
 public:
  bool numa = true;
  int policy_error = 0, populate_error = 0, collapse_error = 0, lock_error = 0, where_error = 0;
  int busy_before_collapse = 0;  // EAGAIN so many times first
  size_t hugetlb = 0;
  size_t huge_share_percent = 100;
  std::vector<int> where = {1};  // nodes of the pages, in turn
  std::vector<std::string> calls;
  std::vector<uint32_t> policy_nodes;

  bool NumaAvailable() override { return numa; }
  int SetPolicy(uint8_t*, size_t, const std::vector<uint32_t>& nodes) override {
    policy_nodes = nodes;
    return Call("policy", policy_error);
  }
  int Populate(int, uint8_t*, size_t, size_t) override { return Call("populate", populate_error); }
  size_t HugeTlbPageBytes(int) override { return hugetlb; }
  int Collapse(uint8_t* at) override {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % kHugePageBytes, 0u);
    ++collapses;
    if (busy_before_collapse-- > 0) return EAGAIN;
    return Call("collapse", collapse_error);
  }
  size_t HugeMapped(uint8_t*, size_t bytes) override {
    Call("look", 0);
    return collapse_error != 0 ? 0 : bytes * huge_share_percent / 100;
  }
  int NodesOf(const std::vector<void*>& pages, std::vector<int>* nodes) override {
    nodes->resize(pages.size());
    for (size_t i = 0; i < pages.size(); ++i) (*nodes)[i] = where[i % where.size()];
    return Call("verify", where_error);
  }
  int Lock(uint8_t*, size_t) override { return Call("lock", lock_error); }
  int collapses = 0;

 private:
  int Call(const std::string& name, int error) {
    if (calls.empty() || calls.back() != name) calls.push_back(name);
    return error;
  }
};

class Placement : public ::testing::Test {
 protected:
  StatusOr<PlacementReport> Place() {
    options_.system = &kernel_;
    return PlacePages(
        segment_->fd(), segment_->data(), segment_->size(), options_,
        [this](uint64_t done, uint64_t total) {
          done_ = {done, total};
        },
        stop_);
  }
  PlacementReport Placed() {
    auto report = Place();
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *report : PlacementReport{};
  }
  std::unique_ptr<Segment> segment_ = *Segment::Create("place", kPages* kHugePageBytes);
  FakeKernel kernel_;
  PlacementOptions options_ = {{1}, true, true, nullptr};
  std::atomic<bool> stop_{false};
  std::pair<uint64_t, uint64_t> done_;
};

TEST_F(Placement, StepsComeInTheOnlyOrderThatWorks) {
  const PlacementReport report = Placed();
  EXPECT_THAT(kernel_.calls,
              ElementsAre("policy", "populate", "collapse", "look", "verify", "lock"));
  EXPECT_THAT(kernel_.policy_nodes, ElementsAre(1u));
  EXPECT_EQ(kernel_.collapses, static_cast<int>(kPages));
  EXPECT_EQ(report.pages, "2 MiB (100 %)");
  EXPECT_EQ(report.numa, "node 1: 100 % of 512 sampled pages");
  EXPECT_TRUE(report.locked);
  EXPECT_THAT(report.warnings, IsEmpty());
  EXPECT_EQ(done_, std::make_pair(segment_->size(), segment_->size()));
}

TEST_F(Placement, ReservedHugePagesNeedNoCollapse) {
  kernel_.hugetlb = kHugePageBytes;
  EXPECT_EQ(Placed().pages, "2048 KiB (hugetlb)");
  EXPECT_THAT(kernel_.calls, ElementsAre("policy", "populate", "verify", "lock"));
}

TEST_F(Placement, NothingIsAskedForThatNobodyWants) {
  options_.numa_nodes = {};
  options_.collapse = options_.lock = false;
  const PlacementReport report = Placed();
  EXPECT_THAT(kernel_.calls, ElementsAre("populate"));
  EXPECT_EQ(report.pages, "4 KiB");
  EXPECT_EQ(report.numa, "no policy");
  EXPECT_FALSE(report.locked);
  options_.numa_nodes = {0};
  kernel_.numa = false;
  EXPECT_EQ(Placed().numa, "no policy");
}

// A worker that spans two nodes has its pages on both; pages on a third are wrong.
TEST_F(Placement, SeveralNodes) {
  options_.numa_nodes = {0, 2};
  kernel_.where = {0, 2, 0, 2};
  EXPECT_EQ(Placed().numa, "node 0+2: 100 % of 512 sampled pages");
  EXPECT_THAT(kernel_.policy_nodes, ElementsAre(0u, 2u));
  kernel_.where = {0, 1, 2, 1};
  const PlacementReport report = Placed();
  EXPECT_EQ(report.numa, "node 0+2: 50 % of 512 sampled pages");
  ASSERT_THAT(report.warnings, SizeIs(1));
  EXPECT_THAT(report.warnings[0], HasSubstr("only 256 of 512 sampled pages lie on NUMA node 0+2"));
}

TEST_F(Placement, WhatIsMissingIsAWarningWithItsRemedy) {
  kernel_.policy_error = EINVAL;
  kernel_.collapse_error = EINVAL;
  kernel_.lock_error = ENOMEM;
  kernel_.where_error = EPERM;
  const PlacementReport report = Placed();
  EXPECT_EQ(kernel_.collapses, 1) << "the first EINVAL says it all";
  EXPECT_EQ(report.pages, "4 KiB");
  EXPECT_THAT(report.numa, HasSubstr("not verified"));
  EXPECT_FALSE(report.locked);
  ASSERT_THAT(report.warnings, SizeIs(3));
  EXPECT_THAT(report.warnings[0], HasSubstr("no memory policy for NUMA node 1"));
  EXPECT_THAT(report.warnings[1], HasSubstr("huge_pages = \"hugetlb\""));
  EXPECT_THAT(report.warnings[2], HasSubstr("LimitMEMLOCK=infinity"));
}

TEST_F(Placement, FewHugePagesAreNamed) {
  kernel_.huge_share_percent = 75;  // 3 of 4
  const PlacementReport report = Placed();
  EXPECT_EQ(report.pages, "2 MiB (75 %)");
  ASSERT_THAT(report.warnings, SizeIs(1));
  EXPECT_THAT(report.warnings[0], HasSubstr("75 %"));
}

TEST_F(Placement, ABusyPageIsTriedAgain) {
  kernel_.busy_before_collapse = 2;
  EXPECT_THAT(Placed().warnings, IsEmpty());
  EXPECT_EQ(kernel_.collapses, static_cast<int>(kPages) + 2);
}

TEST_F(Placement, MissingMemoryIsAnError) {
  kernel_.populate_error = ENOMEM;
  const auto report = Place();
  EXPECT_EQ(report.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(report.status()), HasSubstr("ram_budget"));
  EXPECT_THAT(kernel_.calls, ElementsAre("policy", "populate"));
}

TEST_F(Placement, StopEndsIt) {
  stop_ = true;
  EXPECT_EQ(Place().status().code(), StatusCode::kCancelled);
  EXPECT_THAT(kernel_.calls, ElementsAre("policy"));
}

// This machine: huge pages where the report says so, none where it does not.
TEST(PlacementHere, TheReportIsTrue) {
  auto segment = *Segment::Create("place", 8 * kHugePageBytes);
  const std::atomic<bool> stop{false};
  const auto place = [&](bool collapse) {
    return *PlacePages(
        segment->fd(), segment->data(), segment->size(), {{}, collapse, false, nullptr},
        [](uint64_t, uint64_t) {}, stop);
  };
  const PlacementReport small = place(false);
  EXPECT_EQ(small.pages, "4 KiB");
  EXPECT_EQ(LinuxPages().HugeMapped(segment->data(), segment->size()), 0u);
  const PlacementReport report = place(true);
  const size_t huge = LinuxPages().HugeMapped(segment->data(), segment->size());
  const size_t percent = huge * 100 / segment->size();
  std::printf("pages: %s\n", report.pages.c_str());
  EXPECT_EQ(report.pages, huge == 0 ? "4 KiB" : fmt::format("2 MiB ({} %)", percent));
  EXPECT_EQ(report.warnings.empty(), percent >= 90);
}

// Pages of the machine's reserved pool, where somebody reserved some:
//   echo 64 > /proc/sys/vm/nr_hugepages
TEST(PlacementHere, ReservedHugePagesAreTakenAndGivenBack) {
  const auto free_pages = [] {
    std::ifstream meminfo("/proc/meminfo");
    size_t n = 0;
    for (std::string line; std::getline(meminfo, line);)
      if (std::sscanf(line.c_str(), "HugePages_Free: %zu", &n) == 1) break;
    return n;
  };
  const size_t before = free_pages();
  if (before < kPages) GTEST_SKIP() << "the machine has no pool of huge pages (vm.nr_hugepages)";
  {
    auto segment = Segment::Create("pool", kPages * kHugePageBytes - 1, Segment::Pages::kHugeTlb);
    ASSERT_TRUE(segment.ok()) << Message(segment.status());
    EXPECT_EQ((*segment)->size(), kPages * kHugePageBytes);
    const std::atomic<bool> stop{false};
    const auto report = PlacePages(
        (*segment)->fd(), (*segment)->data(), (*segment)->size(), {{0}, true, true, nullptr},
        [](uint64_t, uint64_t) {}, stop);
    ASSERT_TRUE(report.ok()) << Message(report.status());
    std::printf("pages: %s, numa: %s\n", report->pages.c_str(), report->numa.c_str());
    EXPECT_EQ(report->pages, "2048 KiB (hugetlb)");
    EXPECT_TRUE(report->locked);
    EXPECT_THAT(report->warnings, IsEmpty());
    EXPECT_EQ(free_pages() + kPages, before);
    // More than the pool has is refused when it is made, not when it is touched.
    const auto much =
        Segment::Create("much", (before + 1) * kHugePageBytes, Segment::Pages::kHugeTlb);
    EXPECT_FALSE(much.ok());
  }
  EXPECT_EQ(free_pages(), before);
}

// In a child without privileges: root may lock without limit.
TEST(PlacementHere, LockingMoreThanTheLimitIsNamed) {
  auto segment = *Segment::Create("lock", kHugePageBytes);
  int out[2];
  ASSERT_EQ(pipe(out), 0);
  const pid_t child = fork();
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    const rlimit page = {4096, 4096};
    setrlimit(RLIMIT_MEMLOCK, &page);
    if (geteuid() == 0 && setresuid(kNobody, kNobody, kNobody) != 0) _exit(1);
    const int error = LockPages(segment->data(), segment->size());
    const std::string text = LockWarning("slots", segment->size(), error) +
                             (LockPages(segment->data(), 4096) == 0 ? "|" : "| a page fails too");
    if (error == 0) _exit(2);
    _exit(write(out[1], text.data(), text.size()) > 0 ? 0 : 1);
  }
  close(out[1]);
  char text[1024] = {};
  EXPECT_GT(read(out[0], text, sizeof(text) - 1), 0);
  close(out[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(text, HasSubstr("cannot lock 2 MiB of slots"));
  EXPECT_THAT(text, HasSubstr("the limit is 4 KiB"));
  EXPECT_STREQ(std::strrchr(text, '|'), "|") << "a page fits";
}

}  // namespace
}  // namespace lode
