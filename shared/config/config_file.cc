// The TOML side of the options: a file of [section] tables whose keys are options. The value goes
// through the same text path as a flag, so bounds and messages exist once.
#include <sys/stat.h>
#include <toml++/toml.h>

#include <cerrno>
#include <fstream>
#include <sstream>

#include "shared/config/config.h"
#include "shared/config/option_row.h"

namespace lode {
namespace {

// The value as a flag would spell it.
StatusOr<std::string> AsText(const toml::node& node, const std::string& name,
                             const std::string& where) {
  if (const auto* s = node.as_string()) return s->get();
  if (const auto* i = node.as_integer()) return std::to_string(i->get());
  if (const auto* d = node.as_floating_point()) return fmt::format("{}", d->get());
  if (const auto* b = node.as_boolean()) return std::string(b->get() ? "true" : "false");
  return InvalidArgument("option {} ({}) must be a string, a number, true or false", name, where);
}

}  // namespace

StatusOr<std::string> ReadTextFile(const std::string& path) {
  constexpr off_t kConfigBytesMax = 1 << 20;  // two hundred times the example file
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0)
    return ErrnoStatus(fmt::format("cannot read the configuration file '{}'", path), errno);
  if (!S_ISREG(info.st_mode) || info.st_size > kConfigBytesMax) {
    return InvalidArgument("configuration file '{}' must be a regular file of at most 1 MiB", path);
  }
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) return ErrnoStatus(fmt::format("cannot read the configuration file '{}'", path), errno);
  return text.str();
}

Status ApplyToml(std::string_view text, const std::string& file, Options* options) {
  toml::table root;
  try {
    root = toml::parse(text, file);
  } catch (const toml::parse_error& error) {  // the library is built with exceptions; they end here
    return InvalidArgument("{}:{}: {}", file, error.source().begin.line,
                           std::string(error.description()));
  }
  for (const auto& [section_key, section_node] : root) {
    const std::string section(section_key.str());
    const std::string section_where = fmt::format("{}:{}", file, section_node.source().begin.line);
    const toml::table* table = section_node.as_table();
    if (!table)
      return InvalidArgument("option {} ({}) must stand under a [section]; --help shows which",
                             section, section_where);
    for (const auto& [key, node] : *table) {
      const std::string name(key.str());
      const std::string where = fmt::format("{}:{}", file, node.source().begin.line);
      const OptionRow* row = FindOption(name);
      if (!row || name != row->name)
        return InvalidArgument("there is no option '{}' ({}); --help lists them", name, where);
      if (section != row->section) {
        return InvalidArgument("option {} ({}) belongs under [{}], not [{}]", name, where,
                               row->section, section);
      }
      LODE_ASSIGN_OR_RETURN(const std::string value, AsText(node, name, where));
      LODE_RETURN_IF_ERROR(SetOption(*row, value, where, options));
    }
  }
  return OkStatus();
}

}  // namespace lode
