// Wrong options: every one is refused with a sentence that names option, value, bounds and place.
#include <gtest/gtest.h>

#include "shared/config/config.h"

namespace lode {
namespace {

std::string FlagError(const std::vector<std::string>& args) {
  const auto line = ParseCommandLine(args);
  return line.ok() ? "(accepted)" : Message(line.status());
}

std::string TomlError(const std::string& text) {
  Options options;
  return Message(ApplyToml(text, "f.toml", &options));
}

TEST(Config, MessagesNameOptionValueBoundsAndPlace) {
  EXPECT_EQ(FlagError({"--model=m", "--sequences=65"}),
            "option sequences = '65' (flag --sequences) must be 1 to 64");
  EXPECT_EQ(FlagError({"--model=m", "--device=gpu"}),
            "option device = 'gpu' (flag --device) must be one of auto, cpu, cuda");
  EXPECT_EQ(TomlError("[serving]\n\nprompt_rows = 9\n"),
            "option prompt_rows = '9' (f.toml:3) must be 1 to 8");
  EXPECT_EQ(TomlError("[serving]\nprompt_rows = \"x\"\n"),
            "option prompt_rows = 'x' (f.toml:2) must be 1 to 8");
  EXPECT_EQ(TomlError("[experts]\nlock_memory = 1\n"),
            "option lock_memory = '1' (f.toml:2) must be true or false");
  EXPECT_EQ(TomlError("[api]\nkv_type = \"q8\"\n"),
            "option kv_type (f.toml:2) belongs under [model], not [api]");
  EXPECT_EQ(TomlError("[model]\nmodell = \"x\"\n"),
            "there is no option 'modell' (f.toml:2); --help lists them");
  EXPECT_EQ(TomlError("model = \"x\"\n"),
            "option model (f.toml:1) must stand under a [section]; --help shows which");
  EXPECT_EQ(TomlError("[model]\nmodel = [1]\n"),
            "option model (f.toml:2) must be a string, a number, true or false");
  EXPECT_EQ(TomlError("[model\n").substr(0, 9), "f.toml:1:");
}

TEST(Config, MalformedFlagsAreRefused) {
  EXPECT_EQ(FlagError({}).substr(0, 24), "option model is not set:");
  EXPECT_EQ(FlagError({"--model"}), "option --model needs a value");
  EXPECT_EQ(FlagError({"model"}), "argument 'model' is not an option; options start with --");
  EXPECT_EQ(FlagError({"--nope=1"}), "there is no option --nope; --help lists them");
  EXPECT_EQ(FlagError({"--no-model"}), "there is no option --no-model; --help lists them");
  EXPECT_EQ(FlagError({"--queue=1", "--queue=2"}), "option --queue is given twice");
  for (const char* bad :
       {"", "x", "-1", "1e3", "0x10", " 1", "1 ", "4294967296", "99999999999999999999"}) {
    EXPECT_NE(FlagError({"--model=m", std::string("--queue=") + bad}), "(accepted)") << bad;
  }
  for (const char* bad : {"", "nan", "inf", "1e999", "-2", "1.0x"}) {
    EXPECT_NE(FlagError({"--model=m", std::string("--pull-share=") + bad}), "(accepted)") << bad;
  }
  EXPECT_NE(FlagError({"--config=/does/not/exist"}), "(accepted)");
  EXPECT_NE(FlagError({"--config=/"}), "(accepted)");
}

TEST(Config, RelationsBetweenOptions) {
  EXPECT_NE(FlagError({"--model=m", "--wait-ms=900"}), "(accepted)");
  EXPECT_NE(FlagError({"--model=m", "--context=20000"}), "(accepted)");
  EXPECT_NE(FlagError({"--model=m", "--listen=0.0.0.0:7070"}), "(accepted)");
  EXPECT_NE(FlagError({"--model=m", "--listen=7070"}), "(accepted)");
  EXPECT_NE(FlagError({"--model=m", "--watchdog-seconds=1", "--wait-max-ms=1000"}), "(accepted)");
  EXPECT_EQ(FlagError({"--model=m", "--listen=[::1]:7070"}), "(accepted)");
  EXPECT_EQ(FlagError({"--model=m", "--listen="}), "(accepted)");
}

}  // namespace
}  // namespace lode
