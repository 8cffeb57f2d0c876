// Options of the daemon: the rows of shared/config/fields.h become a TOML reader, a flag parser,
// bounds checks, --help, docs/config.md and deploy/config/lode.example.toml. Flags win over the
// file. Nothing here knows what an option means, except the few relations between options checked
// at the end. Called once by main; pure apart from reading the file.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shared/base/status.h"
#include "shared/config/fields.h"

namespace lode {

struct CommandLine {
  enum class Action { kRun, kHelp, kVersion, kPrintMarkdown, kPrintExampleToml };
  Action action = Action::kRun;
  Options options;
};

// Flags: --name=value or --name value ('-' and '_' are the same in names; a bool may stand alone or
// as --no-name), --config FILE, --help, --version, --print-config-docs, --print-example-config.
// Every error is one sentence that names the option, the value, what is allowed and where it was
// set (FILE:LINE, or the flag). The same flag twice is refused.
StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args);

// Sets what the text of a TOML file says. `file` appears in errors. Unknown sections and keys are
// refused.
Status ApplyToml(std::string_view text, const std::string& file, Options* options);
// One option by its name, as a flag would; `where` appears in errors.
Status ApplyValue(std::string_view name, std::string_view value, const std::string& where,
                  Options* options);
// Relations between options, and the ones that have no default. Bounds of single options are
// checked when they are set.
Status ValidateOptions(const Options& options);

// "8", "1.5GiB", "512 MiB", "64KiB" to bytes.
StatusOr<uint64_t> ParseByteSize(std::string_view text);
// host:port of a TCP listener; true when host is a loopback address or "localhost".
StatusOr<bool> IsLoopbackAddress(std::string_view address);

std::string HelpText(std::string_view program);
std::string OptionsMarkdown();
std::string ExampleToml();
// Names of the options that `lode tune` may change, and one option's value as text (empty: unknown
// name).
std::vector<std::string> OptionsWithoutRestart();
std::string OptionText(std::string_view name, const Options& options);
// "name=value ..." of every option that differs from its default, for the log at start.
std::string ChangedOptions(const Options& options);

}  // namespace lode
