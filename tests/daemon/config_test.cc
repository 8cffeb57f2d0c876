// Options: file and flags, bounds with messages that name option, value, bounds and place, and the
// generated texts.
#include "shared/config/config.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

namespace lode {
namespace {

std::string WriteTemp(const std::string& text) {
  const std::string path = testing::TempDir() + "/config_test.toml";
  std::ofstream(path) << text;
  return path;
}

TEST(Config, FlagsInBothForms) {
  const auto line = ParseCommandLine({"--model", "m.gguf", "--kv-tokens=8192",
                                      "--vram_budget=1.5GiB", "--pull-share=0.25", "--spin-us",
                                      "-1", "--no-lock-memory", "--float-reference"});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->options.model, "m.gguf");
  EXPECT_EQ(line->options.kv_tokens, 8192u);
  EXPECT_EQ(line->options.vram_budget, 1610612736u);
  EXPECT_EQ(line->options.pull_share, 0.25);
  EXPECT_EQ(line->options.spin_us, -1);
  EXPECT_FALSE(line->options.lock_memory);
  EXPECT_TRUE(line->options.float_reference);
  EXPECT_EQ(line->options.sequences, 8u);  // untouched default
}

TEST(Config, FlagsWinOverTheFileInAnyOrder) {
  const std::string path =
      WriteTemp("[model]\nmodel = \"file.gguf\"\n[serving]\nqueue = 7\nsequences = 3\n");
  for (const auto& args : {std::vector<std::string>{"--queue=9", "--config", path},
                           {"--config=" + path, "--queue", "9"}}) {
    const auto line = ParseCommandLine(args);
    ASSERT_TRUE(line.ok()) << line.status();
    EXPECT_EQ(line->options.queue, 9u);
    EXPECT_EQ(line->options.sequences, 3u);
    EXPECT_EQ(line->options.model, "file.gguf");
  }
}

TEST(Config, ByteSizes) {
  EXPECT_EQ(ParseByteSize("0").value(), 0u);
  EXPECT_EQ(ParseByteSize("64 KiB").value(), 65536u);
  EXPECT_EQ(ParseByteSize("2GiB").value(), 2147483648u);
  for (const char* bad : {"", "KiB", "-1", "1.5", "1GB", "1e30GiB", "nanGiB"})
    EXPECT_FALSE(ParseByteSize(bad).ok()) << bad;
}

TEST(Config, TheExampleFileIsTheDefaults) {
  std::string text = ExampleToml();
  // Uncomment the settings: a line "# name = value" directly follows its help line.
  std::string uncommented;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = text.find('\n', begin);
    std::string line = text.substr(begin, end - begin);
    const size_t equals = line.find(" = ");
    if (line.rfind("# ", 0) == 0 && equals != std::string::npos && line.find(' ', 2) == equals)
      line = line.substr(2);
    uncommented += line + "\n";
    begin = end + 1;
  }
  Options options;
  const Status status = ApplyToml(uncommented, "example", &options);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(ChangedOptions(options), "");
  for (const std::string& generated : {HelpText("loded"), OptionsMarkdown(), text}) {
    EXPECT_NE(generated.find("slow"), std::string::npos);
    EXPECT_NE(generated.find("serving"), std::string::npos);
  }
}

TEST(Config, TheFilesInTheTreeAreUpToDate) {
  for (const auto& [path, text] :
       {std::pair<std::string, std::string>{"docs/config.md", OptionsMarkdown()},
        {"deploy/config/lode.example.toml", ExampleToml()}}) {
    std::ifstream in(std::string(LODE_SOURCE_DIR) + "/" + path);
    const std::string found((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    EXPECT_EQ(found, text) << path
                           << " is old: run loded --print-config-docs or --print-example-config";
  }
}

}  // namespace
}  // namespace lode
