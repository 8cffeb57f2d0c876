// The metrics page of a running server: every row of the metric list with a source is on it, with
// the right type, labels and values, and nothing else but the exposer's own families.
#include <curl/curl.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "api_fixture.h"
#include "shared/metrics/metric_list.h"

namespace lode {
namespace {

struct Row {
  std::string name, kind, labels;
};
const std::vector<Row>& Rows() {
  static const std::vector<Row> rows = {
#define LODE_X(id, name, kind, labels, help) {name, #kind, labels},
      LODE_METRICS(LODE_X)
#undef LODE_X
  };
  return rows;
}

size_t Append(char* data, size_t size, size_t count, void* out) {
  static_cast<std::string*>(out)->append(data, size * count);
  return size * count;
}

std::string Fetch(const std::string& url, long* code) {
  std::string body;
  CURL* curl = curl_easy_init();
  curl_easy_setopt(curl, CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
  curl_easy_setopt(curl, CURLOPT_TIMEOUT, 60L);
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, &Append);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &body);
  EXPECT_EQ(curl_easy_perform(curl), CURLE_OK);
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, code);
  curl_easy_cleanup(curl);
  return body;
}

// "name{labels}" -> value, and family -> type.
struct Page {
  std::map<std::string, double> samples;
  std::map<std::string, std::string> types;
  bool Has(const std::string& sample, double value) const {
    const auto it = samples.find(sample);
    return it != samples.end() && it->second == value;
  }
};

Page Parse(const std::string& text) {
  Page page;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string hash, keyword, name, type;
    if (line.rfind("# TYPE ", 0) == 0) {
      words >> hash >> keyword >> name >> type;
      page.types[name] = type;
    } else if (!line.empty() && line[0] != '#') {
      const size_t space = line.rfind(' ');
      page.samples[line.substr(0, space)] = std::strtod(line.c_str() + space, nullptr);
    }
  }
  return page;
}

class MetricsTest : public ApiTest {
 protected:
  void SetUp() override {
    ApiTest::SetUp();
    options_.metrics_listen = "127.0.0.1:0";
  }
  std::string Scrape() {
    long code = 0;
    const std::string text = Fetch(MetricsUrl(), &code);
    EXPECT_EQ(code, 200);
    return text;
  }
  void FillEverything() {
    EngineSnapshot snapshot;
    snapshot.hit_rate = 0.75;
    snapshot.pcie_share = 0.25;
    snapshot.queued = 3;
    snapshot.kv_blocks = 64;
    snapshot.last_progress_ns = NowNs();
    snapshot.workers.push_back({"gpu0", "ready", "", 1, 0});
    snapshot.workers.push_back({"cpu0", "dead", "", 0, 2});
    engine_.SetSnapshot(snapshot);
    counters_.lookups[2] = 17;
    counters_.lane_ns[0] = 1'500'000'000;
    counters_.requests_finished[1] = 5;
    counters_.windows_ok = 9;
    counters_.window_time.Observe(600'000);  // second bucket
  }
};

TEST_F(MetricsTest, EveryRowOfTheListIsOnThePage) {
  FillEverything();
  ASSERT_TRUE(Start().ok());
  const Page page = Parse(Scrape());
  std::set<std::string> known;
  for (const Row& row : Rows()) {
    std::string type = row.kind;
    type[0] = static_cast<char>(std::tolower(type[0]));
    ASSERT_EQ(page.types.count(row.name), 1u) << row.name;
    EXPECT_EQ(page.types.at(row.name), type) << row.name;
    known.insert(row.name);
    // One sample at least, with all its labels.
    bool found = false;
    for (const auto& [sample, value] : page.samples) {
      if (sample.rfind(row.name, 0) != 0) continue;
      found = true;
      std::istringstream labels(row.labels);
      for (std::string label; std::getline(labels, label, ',');)
        EXPECT_NE(sample.find(label + "=\""), std::string::npos) << sample << " lacks " << label;
    }
    EXPECT_TRUE(found) << row.name;
  }
  for (const auto& [family, type] : page.types)
    EXPECT_TRUE(known.count(family) == 1 || family.rfind("exposer_", 0) == 0)
        << family << " is in no list";
}

TEST_F(MetricsTest, ValuesAreTheEngines) {
  FillEverything();
  ASSERT_TRUE(Start().ok());
  const Page page = Parse(Scrape());
  EXPECT_TRUE(page.Has("lode_hit_rate{device=\"0\"}", 0.75));
  EXPECT_TRUE(page.Has("lode_pcie_share{device=\"0\"}", 0.25));
  EXPECT_TRUE(page.Has("lode_expert_lookups_total{device=\"0\",lane=\"cpu\"}", 17));
  EXPECT_TRUE(page.Has("lode_lane_seconds_total{device=\"0\",lane=\"hit\"}", 1.5));
  EXPECT_TRUE(page.Has("lode_requests_total{reason=\"length\"}", 5));
  EXPECT_TRUE(page.Has("lode_windows_total{device=\"0\",status=\"ok\"}", 9));
  EXPECT_TRUE(page.Has("lode_queued_requests", 3));
  EXPECT_TRUE(page.Has("lode_worker_up{worker=\"gpu0\"}", 1));
  EXPECT_TRUE(page.Has("lode_worker_up{worker=\"cpu0\"}", 0));
  EXPECT_TRUE(page.Has("lode_worker_restarts_total{worker=\"cpu0\"}", 2));
  EXPECT_TRUE(page.Has("lode_window_seconds_bucket{device=\"0\",le=\"0.0005\"}", 0));
  EXPECT_TRUE(page.Has("lode_window_seconds_bucket{device=\"0\",le=\"0.001\"}", 1));
  EXPECT_TRUE(page.Has("lode_window_seconds_bucket{device=\"0\",le=\"+Inf\"}", 1));
  EXPECT_TRUE(page.Has("lode_window_seconds_count{device=\"0\"}", 1));
  counters_.lookups[2] = 18;
  EXPECT_TRUE(Parse(Scrape()).Has("lode_expert_lookups_total{device=\"0\",lane=\"cpu\"}", 18));
}

TEST_F(MetricsTest, WithoutWorkersOnlyTheirFamiliesAreMissing) {
  ASSERT_TRUE(Start().ok());
  const Page page = Parse(Scrape());
  for (const Row& row : Rows())
    EXPECT_EQ(page.types.count(row.name), row.labels == "worker" ? 0u : 1u) << row.name;
}

TEST_F(MetricsTest, PromtoolFindsNothing) {
  if (std::system("command -v promtool >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "promtool (package prometheus) is not installed";
  }
  FillEverything();
  ASSERT_TRUE(Start().ok());
  Scrape();  // the exposer's own summary is NaN before a first scrape
  const std::string page = dir_ + "/page", said = dir_ + "/said";
  std::ofstream(page) << Scrape();
  const int code =
      std::system(("promtool check metrics < " + page + " > " + said + " 2>&1").c_str());
  std::stringstream findings;
  findings << std::ifstream(said).rdbuf();
  EXPECT_EQ(code, 0) << findings.str();
  EXPECT_EQ(findings.str(), "");
}

TEST_F(MetricsTest, OtherPathsAreNotServed) {
  ASSERT_TRUE(Start().ok());
  long code = 0;
  Fetch(MetricsUrl() + "/../../etc/passwd", &code);
  EXPECT_EQ(code, 404);
}

TEST(DocgenLists, NamesAndUnitsFollowThePrometheusRules) {
  std::set<std::string> seen;
  for (const Row& row : Rows()) {
    EXPECT_TRUE(seen.insert(row.name).second) << row.name << " is listed twice";
    EXPECT_EQ(row.name.rfind("lode_", 0), 0u) << row.name;
    const bool total =
        row.name.size() > 6 && row.name.compare(row.name.size() - 6, 6, "_total") == 0;
    EXPECT_EQ(total, row.kind == "Counter") << row.name;
    EXPECT_EQ(row.name.find("_ms"), std::string::npos) << row.name;
  }
}

}  // namespace
}  // namespace lode
