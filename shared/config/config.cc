// Rows, bounds, flags and the texts made of the rows. The TOML library is heavy to compile and has
// its own file, shared/config/config_file.cc.
#include "shared/config/config.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <set>

#include "kernels/isa_list.h"
#include "shared/config/option_row.h"

namespace lode {
namespace {

template <class T>
struct KindOf;
template <>
struct KindOf<std::string> {
  static constexpr OptionKind value = OptionKind::kString;
};
template <>
struct KindOf<bool> {
  static constexpr OptionKind value = OptionKind::kBool;
};
template <>
struct KindOf<uint32_t> {
  static constexpr OptionKind value = OptionKind::kUint32;
};
template <>
struct KindOf<int32_t> {
  static constexpr OptionKind value = OptionKind::kInt32;
};
template <>
struct KindOf<uint64_t> {
  static constexpr OptionKind value = OptionKind::kBytes;
};
template <>
struct KindOf<double> {
  static constexpr OptionKind value = OptionKind::kDouble;
};

std::vector<std::string> IsaWords() {
  std::vector<std::string> words = {"auto"};
  words.insert(words.end(), std::begin(kIsaNames), std::end(kIsaNames));
  return words;
}

// The words of options that are a choice. An option not listed here takes any string.
struct ChoiceRow {
  const char* name;
  std::vector<std::string> words;
};
const std::vector<ChoiceRow>& Choices() {
  static const std::vector<ChoiceRow> kRows = {
      {"kv_type", {"q8", "f16", "f32"}},
      {"device", {"auto", "cpu", "cuda"}},
      {"isa", IsaWords()},
      {"split_policy", {"auto", "fixed", "balanced"}},
      {"tier_policy", {"static", "decayed_lfu"}},
      {"mtp_norm", {"full", "stream"}},
      {"draft_source", {"none", "head", "lookup", "both"}},
      {"draft_policy", {"learned", "fixed"}},
      {"huge_pages", {"none", "transparent", "hugetlb"}},
      {"log_level", {"trace", "debug", "info", "warn", "error"}},
  };
  return kRows;
}

std::string Canonical(std::string_view name) {
  std::string out(name);
  std::replace(out.begin(), out.end(), '-', '_');
  return out;
}

std::string Dashed(std::string_view name) {
  std::string out(name);
  std::replace(out.begin(), out.end(), '_', '-');
  return out;
}

bool ParseDouble(std::string_view text, double* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size() && std::isfinite(*out);
}

bool ParseInteger(std::string_view text, int64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

std::string Join(const std::vector<std::string>& words, const char* between) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : between) + word;
  return out;
}

const std::vector<std::string>* ChoiceWords(std::string_view name) {
  for (const ChoiceRow& row : Choices()) {
    if (name == row.name) return &row.words;
  }
  return nullptr;
}

std::string BoundsText(const OptionRow& row) {
  if (const auto* words = ChoiceWords(row.name)) return "one of " + Join(*words, ", ");
  switch (row.kind) {
    case OptionKind::kString:
      return "a string";
    case OptionKind::kBool:
      return "true or false";
    case OptionKind::kBytes:
      return fmt::format("{:.0f} to {:.0f} bytes (KiB, MiB, GiB allowed)", row.minimum,
                         row.maximum);
    case OptionKind::kDouble:
      return fmt::format("{} to {}", row.minimum, row.maximum);
    case OptionKind::kUint32:
    case OptionKind::kInt32:
      return fmt::format("{:.0f} to {:.0f}", row.minimum, row.maximum);
  }
  return "";
}

Status Refuse(const OptionRow& row, std::string_view value, const std::string& where) {
  return InvalidArgument("option {} = '{}' ({}) must be {}", row.name, value, where,
                         BoundsText(row));
}

std::string_view Trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// The value as a flag would spell it.
std::string ValueText(const OptionRow& row, const Options& options) {
  const void* field = row.field(const_cast<Options*>(&options));
  switch (row.kind) {
    case OptionKind::kString:
      return *static_cast<const std::string*>(field);
    case OptionKind::kBool:
      return *static_cast<const bool*>(field) ? "true" : "false";
    case OptionKind::kUint32:
      return std::to_string(*static_cast<const uint32_t*>(field));
    case OptionKind::kInt32:
      return std::to_string(*static_cast<const int32_t*>(field));
    case OptionKind::kBytes:
      return std::to_string(*static_cast<const uint64_t*>(field));
    case OptionKind::kDouble:
      return fmt::format("{}", *static_cast<const double*>(field));
  }
  return "";
}

std::string TomlValue(const OptionRow& row, const Options& options) {
  const std::string text = ValueText(row, options);
  if (row.kind == OptionKind::kString) return '"' + text + '"';
  const bool needs_point =
      row.kind == OptionKind::kDouble && text.find_first_of(".e") == std::string::npos;
  return needs_point ? text + ".0" : text;
}

}  // namespace

const std::vector<OptionRow>& OptionRows() {
  static const std::vector<OptionRow> kRows = {
#define LODE_X(section, name, type, def, min, max, restart, help) \
  OptionRow{#section,                                             \
            #name,                                                \
            KindOf<type>::value,                                  \
            static_cast<double>(min),                             \
            static_cast<double>(max),                             \
            restart,                                              \
            help,                                                 \
            [](Options* options) -> void* { return &options->name; }},
      LODE_OPTIONS(LODE_X)
#undef LODE_X
  };
  return kRows;
}

const OptionRow* FindOption(std::string_view name) {
  const std::string canonical = Canonical(name);
  for (const OptionRow& row : OptionRows()) {
    if (canonical == row.name) return &row;
  }
  return nullptr;
}

StatusOr<uint64_t> ParseByteSize(std::string_view text) {
  struct Unit {
    const char* suffix;
    double bytes;
  };
  static constexpr Unit kUnits[] = {
      {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0}, {"TiB", 1099511627776.0}};
  std::string_view number = Trim(text);
  double unit = 1;
  for (const Unit& u : kUnits) {
    if (number.size() > 3 && number.substr(number.size() - 3) == u.suffix) {
      unit = u.bytes;
      number = Trim(number.substr(0, number.size() - 3));
      break;
    }
  }
  int64_t whole = 0;
  if (unit == 1) {
    if (!ParseInteger(number, &whole) || whole < 0)
      return InvalidArgument("'{}' is not a number of bytes", text);
    return static_cast<uint64_t>(whole);
  }
  double value = 0;
  constexpr double kBytesMax = 9.0e18;  // below 2^63
  if (!ParseDouble(number, &value) || value < 0 || value * unit > kBytesMax) {
    return InvalidArgument("'{}' is not a number of bytes", text);
  }
  return static_cast<uint64_t>(value * unit);
}

Status SetOption(const OptionRow& row, std::string_view value, const std::string& where,
                 Options* options) {
  void* field = row.field(options);
  double number = 0;
  switch (row.kind) {
    case OptionKind::kString: {
      const auto* words = ChoiceWords(row.name);
      if (words && std::find(words->begin(), words->end(), value) == words->end())
        return Refuse(row, value, where);
      if (value.find('\0') != std::string_view::npos)
        return Refuse(row, "(text with a zero byte)", where);
      *static_cast<std::string*>(field) = std::string(value);
      return OkStatus();
    }
    case OptionKind::kBool:
      if (value != "true" && value != "false") return Refuse(row, value, where);
      *static_cast<bool*>(field) = value == "true";
      return OkStatus();
    case OptionKind::kBytes: {
      const auto bytes = ParseByteSize(value);
      if (!bytes.ok() || static_cast<double>(*bytes) > row.maximum)
        return Refuse(row, value, where);
      *static_cast<uint64_t*>(field) = *bytes;
      return OkStatus();
    }
    case OptionKind::kDouble:
      if (!ParseDouble(value, &number) || number < row.minimum || number > row.maximum)
        return Refuse(row, value, where);
      *static_cast<double*>(field) = number;
      return OkStatus();
    case OptionKind::kUint32:
    case OptionKind::kInt32: {
      int64_t whole = 0;
      if (!ParseInteger(value, &whole)) return Refuse(row, value, where);
      number = static_cast<double>(whole);
      if (number < row.minimum || number > row.maximum) return Refuse(row, value, where);
      if (row.kind == OptionKind::kUint32)
        *static_cast<uint32_t*>(field) = static_cast<uint32_t>(whole);
      else
        *static_cast<int32_t*>(field) = static_cast<int32_t>(whole);
      return OkStatus();
    }
  }
  return OkStatus();
}

Status ApplyValue(std::string_view name, std::string_view value, const std::string& where,
                  Options* options) {
  const OptionRow* row = FindOption(name);
  if (!row) return InvalidArgument("there is no option '{}' ({}); --help lists them", name, where);
  return SetOption(*row, value, where, options);
}

StatusOr<bool> IsLoopbackAddress(std::string_view address) {
  const size_t colon = address.rfind(':');
  int64_t port = 0;
  if (colon == std::string_view::npos || colon == 0 ||
      !ParseInteger(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return InvalidArgument("'{}' is not host:port", address);
  }
  std::string_view host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  return host == "localhost" || host == "::1" || host.substr(0, 4) == "127.";
}

Status ValidateOptions(const Options& options) {
  if (options.model.empty()) {
    return InvalidArgument(
        "option model is not set: give --model=FILE.gguf, or model = \"...\" under [model] in the "
        "file "
        "named by --config");
  }
  if (options.wait_max_ms < options.wait_ms) {
    return InvalidArgument("option wait_max_ms = {} must not be below wait_ms = {}",
                           options.wait_max_ms, options.wait_ms);
  }
  if (options.context > options.kv_tokens) {
    return InvalidArgument("option context = {} must not be above kv_tokens = {}", options.context,
                           options.kv_tokens);
  }
  if (options.draft_vocab_top > 0 && options.draft_vocab.empty()) {
    return InvalidArgument("option draft_vocab_top = {} needs draft_vocab, the file with the counts",
                           options.draft_vocab_top);
  }
  if (options.watchdog_seconds * 1000 <= options.wait_max_ms) {
    return InvalidArgument(
        "option watchdog_seconds = {} must be longer than wait_max_ms = {}: the shorter wait names "
        "the "
        "culprit",
        options.watchdog_seconds, options.wait_max_ms);
  }
  if (!options.listen.empty()) {
    LODE_ASSIGN_OR_RETURN(const bool loopback, IsLoopbackAddress(options.listen));
    if (!loopback) {
      return InvalidArgument(
          "option listen = '{}' must be a loopback address: the client API has no access control; "
          "put "
          "a proxy with access control in front of it",
          options.listen);
    }
  }
  if (!options.metrics_listen.empty())
    LODE_RETURN_IF_ERROR(IsLoopbackAddress(options.metrics_listen).status());
  if (options.float_reference && options.device == "cuda") {
    return InvalidArgument("option float_reference needs device = cpu, not cuda");
  }
  return OkStatus();
}

std::string HelpText(std::string_view program) {
  std::string out = fmt::format(
      "Usage: {} --model=FILE [--config=FILE] [--option=value]...\n\nServes a large "
      "mixture-of-experts model. Options come "
      "from the TOML file, then from flags.\n\n  --config=FILE              TOML file of options\n "
      " --help, --version\n"
      "  --print-example-config     an example of that file, with every default\n  "
      "--print-config-docs        the list "
      "of options as Markdown\n",
      program);
  std::string section;
  const Options defaults;
  for (const OptionRow& row : OptionRows()) {
    if (section != row.section) {
      section = row.section;
      out += fmt::format("\n{}:\n", section);
    }
    const std::string value = ValueText(row, defaults);
    out += fmt::format("  --{:<24} {} [{}]\n", Dashed(row.name), row.help,
                       value.empty() ? "\"\"" : value);
  }
  return out;
}

std::string OptionsMarkdown() {
  std::string out =
      "# Options\n\nMade from `shared/config/fields.h` by `loded --print-config-docs`; do not "
      "edit.\n\n"
      "Every option is a flag (`--kv-tokens=8192`) and a key of the TOML file named by `--config` "
      "(`kv_tokens = 8192` under "
      "`[serving]`). Flags win. Byte sizes take KiB, MiB, GiB and TiB.\n";
  std::string section;
  const Options defaults;
  for (const OptionRow& row : OptionRows()) {
    if (section != row.section) {
      section = row.section;
      out += fmt::format(
          "\n## {}\n\n| option | default | allowed | restart | meaning |\n|---|---|---|---|---|\n",
          section);
    }
    out += fmt::format("| `{}` | `{}` | {} | {} | {} |\n", row.name, TomlValue(row, defaults),
                       BoundsText(row), row.restart ? "yes" : "no", row.help);
  }
  return out;
}

std::string ExampleToml() {
  std::string out =
      "# Every option of loded with its default, made by `loded --print-example-config`. Remove "
      "the leading '# ' to set "
      "one.\n# Meaning and bounds: docs/config.md.\n";
  std::string section;
  const Options defaults;
  for (const OptionRow& row : OptionRows()) {
    if (section != row.section) {
      section = row.section;
      out += fmt::format("\n[{}]\n", section);
    }
    out += fmt::format("# {}\n# {} = {}\n", row.help, row.name, TomlValue(row, defaults));
  }
  return out;
}

std::vector<std::string> OptionsWithoutRestart() {
  std::vector<std::string> names;
  for (const OptionRow& row : OptionRows()) {
    if (!row.restart) names.push_back(row.name);
  }
  return names;
}

std::string OptionText(std::string_view name, const Options& options) {
  const OptionRow* row = FindOption(name);
  return row ? ValueText(*row, options) : "";
}

std::string ChangedOptions(const Options& options) {
  std::string out;
  const Options defaults;
  for (const OptionRow& row : OptionRows()) {
    const std::string value = ValueText(row, options);
    if (value != ValueText(row, defaults))
      out += fmt::format("{}{}={}", out.empty() ? "" : " ", row.name, value);
  }
  return out;
}

namespace {

// One flag split into its parts. `consumed` = arguments used (1 or 2).
struct Flag {
  std::string name, value;
  size_t consumed = 1;
};

StatusOr<Flag> SplitFlag(const std::vector<std::string>& args, size_t at) {
  const std::string& arg = args[at];
  if (arg.size() < 3 || arg.compare(0, 2, "--") != 0) {
    return InvalidArgument("argument '{}' is not an option; options start with --", arg);
  }
  Flag flag;
  const size_t equals = arg.find('=');
  flag.name =
      Canonical(std::string_view(arg).substr(2, equals == std::string::npos ? equals : equals - 2));
  if (equals != std::string::npos) {
    flag.value = arg.substr(equals + 1);
    return flag;
  }
  const OptionRow* row = FindOption(flag.name);
  if (!row && flag.name.compare(0, 3, "no_") == 0) {
    const OptionRow* negated = FindOption(flag.name.substr(3));
    if (negated && negated->kind == OptionKind::kBool) return Flag{flag.name.substr(3), "false", 1};
  }
  if (row && row->kind == OptionKind::kBool) return Flag{flag.name, "true", 1};
  if (!row && flag.name != "config")
    return flag;  // refused, or a word without a value, by the caller
  if (at + 1 >= args.size()) return InvalidArgument("option --{} needs a value", Dashed(flag.name));
  flag.value = args[at + 1];
  flag.consumed = 2;
  return flag;
}

StatusOr<CommandLine::Action> ActionOf(const std::string& name) {
  if (name == "help") return CommandLine::Action::kHelp;
  if (name == "version") return CommandLine::Action::kVersion;
  if (name == "print_config_docs") return CommandLine::Action::kPrintMarkdown;
  if (name == "print_example_config") return CommandLine::Action::kPrintExampleToml;
  return InvalidArgument("there is no option --{}; --help lists them", Dashed(name));
}

}  // namespace

StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args) {
  CommandLine line;
  std::vector<Flag> flags;
  std::set<std::string> seen;
  for (size_t i = 0; i < args.size();) {
    LODE_ASSIGN_OR_RETURN(Flag flag, SplitFlag(args, i));
    i += flag.consumed;
    if (!seen.insert(flag.name).second)
      return InvalidArgument("option --{} is given twice", Dashed(flag.name));
    if (flag.name == "config") {
      LODE_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(flag.value));
      LODE_RETURN_IF_ERROR(ApplyToml(text, flag.value, &line.options));
    } else if (FindOption(flag.name)) {
      flags.push_back(std::move(flag));
    } else {
      LODE_ASSIGN_OR_RETURN(line.action, ActionOf(flag.name));
    }
  }
  for (const Flag& flag : flags) {  // after the file, whatever the order on the command line
    LODE_RETURN_IF_ERROR(
        ApplyValue(flag.name, flag.value, "flag --" + Dashed(flag.name), &line.options));
  }
  if (line.action == CommandLine::Action::kRun) LODE_RETURN_IF_ERROR(ValidateOptions(line.options));
  return line;
}

}  // namespace lode
