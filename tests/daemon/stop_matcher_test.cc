// The stop matcher against a naive search, over random cuts; the reported cases of other engines.

#include "daemon/stop_matcher.h"

#include <gtest/gtest.h>

#include <random>

namespace lode {
namespace {

StopMatcher Make(std::vector<std::string> stops) {
  auto made = StopMatcher::Create(std::move(stops));
  EXPECT_TRUE(made.ok()) << made.status();
  return *std::move(made);
}

struct Outcome {
  std::string text;
  int matched = -1;
  bool operator==(const Outcome&) const = default;
};

// The rule, word by word: the first place where some stop string is complete; the longest, then the
// lowest index there.
Outcome Naive(const std::vector<std::string>& stops, const std::string& text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    int best = -1;
    for (size_t i = 0; i < stops.size(); ++i) {
      if (!std::string_view(text).substr(0, end).ends_with(stops[i])) continue;
      if (best < 0 || stops[i].size() > stops[best].size()) best = static_cast<int>(i);
    }
    if (best >= 0) return {text.substr(0, end - stops[best].size()), best};
  }
  return {text, -1};
}

// What must be held: the longest suffix that is a proper prefix of a stop string.
std::string NaiveHeld(const std::vector<std::string>& stops, const std::string& text) {
  size_t held = 0;
  for (const std::string& stop : stops) {
    for (size_t n = 1; n < stop.size(); ++n) {
      if (std::string_view(text).ends_with(std::string_view(stop).substr(0, n)))
        held = std::max(held, n);
    }
  }
  return text.substr(text.size() - held);
}

TEST(StopMatcher, AgreesWithNaiveSearch) {
  std::mt19937 rng(6);
  auto random = [&](int letters, size_t n) {
    std::string s;
    for (size_t i = 0; i < n; ++i) s.push_back(static_cast<char>('a' + rng() % letters));
    return s;
  };
  int matches = 0;
  for (int round = 0; round < 20000; ++round) {
    int letters = 2 + rng() % 2;
    std::vector<std::string> stops;
    for (int i = 0, n = rng() % 4; i < n; ++i) stops.push_back(random(letters, 1 + rng() % 6));
    std::string text = random(letters, rng() % 24);
    Outcome expected = Naive(stops, text), got;
    StopMatcher m = Make(stops);
    for (size_t at = 0; at < text.size() && got.matched < 0;) {
      size_t n = std::min<size_t>(text.size() - at, 1 + rng() % 5);
      StopMatcher::Piece piece = m.Push(std::string_view(text).substr(at, n));
      at += n;
      got.text += piece.text;
      got.matched = piece.matched;
      if (got.matched < 0) {
        EXPECT_EQ(m.held(), NaiveHeld(stops, text.substr(0, at)));
      }
    }
    got.text += m.Flush();
    ASSERT_EQ(got, expected) << "text " << text;
    matches += got.matched >= 0;
  }
  EXPECT_GT(matches, 3000);  // the test must test something
}

TEST(StopMatcher, StopStringOverSeveralPieces) {
  StopMatcher m = Make({"own fox"});
  EXPECT_EQ(m.Push("the br").text, "the br");
  EXPECT_EQ(m.Push("own").text, "");
  EXPECT_EQ(m.held(), "own");
  EXPECT_EQ(m.Push(" f").text, "");
  StopMatcher::Piece last = m.Push("ox jumps");
  EXPECT_EQ(last.text, "");
  EXPECT_EQ(last.matched, 0);
  EXPECT_EQ(m.Push("more").text, "");
  EXPECT_EQ(m.Flush(), "");
  EXPECT_EQ(m.matched(), 0);
}

TEST(StopMatcher, HeldTextComesBack) {
  StopMatcher m = Make({"</think>"});
  EXPECT_EQ(m.Push("x</thi").text, "x");
  EXPECT_EQ(m.Push("s").text, "</this");
  EXPECT_EQ(m.Push("</").text, "");
  EXPECT_EQ(m.Flush(), "</");
}

TEST(StopMatcher, OverlappingStopStrings) {
  EXPECT_EQ(Make({"abcd", "bc"}).Push("xabcd").matched, 1);
  EXPECT_EQ(Make({"abcd", "bc"}).Push("xabcd").text, "xa");
  EXPECT_EQ(Make({"bc", "abc"}).Push("abc").matched, 1);  // complete at once: the longest
  EXPECT_EQ(Make({"aab"}).Push("aaab").text, "a");
  EXPECT_EQ(Make({"x", "x"}).Push("x").matched, 0);
}

TEST(StopMatcher, Utf8IsNeverCut) {
  StopMatcher m = Make({"\xC3\xA9t"});             // "ét"
  EXPECT_EQ(m.Push("\xC3\xA8").text, "\xC3\xA8");  // "è" shares the first byte only
  EXPECT_EQ(m.Push("\xC3\xA9").text, "");
  EXPECT_EQ(m.Push("s").text, "\xC3\xA9s");
}

TEST(StopMatcher, NoStopStrings) {
  StopMatcher m = Make({});
  EXPECT_EQ(m.Push("anything").text, "anything");
  EXPECT_EQ(m.Flush(), "");
}

TEST(StopMatcher, Refusals) {
  EXPECT_TRUE(absl::IsInvalidArgument(StopMatcher::Create({"a", ""}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(StopMatcher::Create({std::string(1025, 'a')}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(StopMatcher::Create({"\x80"}).status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(StopMatcher::Create(std::vector<std::string>(65, "a")).status()));
}

}  // namespace
}  // namespace lode
