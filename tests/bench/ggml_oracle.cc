// See ggml_oracle.h.
#include "tests/bench/ggml_oracle.h"

#include <dirent.h>
#include <dlfcn.h>

#include <memory>

namespace lode::bench {
namespace {

constexpr const char* kBase = "libggml-base.so";
constexpr const char* kPrefix = "libggml-cpu-";
constexpr const char* kSuffix = ".so";

// What ggml_get_type_traits_cpu returns, field by field.
struct CpuTraits {
  void (*from_float)(const float*, void*, int64_t);
  void (*vec_dot)(int, float*, size_t, const void*, size_t, const void*, size_t, int);
  int vec_dot_type;
  int64_t nrows;
};

template <class F>
bool Symbol(void* library, const char* name, F* out) {
  *out = reinterpret_cast<F>(dlsym(library, name));
  return *out != nullptr;
}

std::vector<std::string> Variants(const std::string& folder) {
  struct Close {
    void operator()(DIR* d) const { closedir(d); }
  };
  const std::unique_ptr<DIR, Close> dir(opendir(folder.c_str()));
  std::vector<std::string> names;
  while (const dirent* entry = dir ? readdir(dir.get()) : nullptr) {
    const std::string name = entry->d_name, prefix = kPrefix, suffix = kSuffix;
    if (name.rfind(prefix, 0) == 0 && name.size() > prefix.size() + suffix.size() &&
        name.substr(name.size() - suffix.size()) == suffix)
      names.push_back(name.substr(prefix.size(), name.size() - prefix.size() - suffix.size()));
  }
  return names;
}

}  // namespace

std::vector<uint8_t> GgmlDot::Quantize(const std::vector<float>& x) const {
  constexpr int kFloat = 0;
  std::vector<uint8_t> y(row_size(act_type, static_cast<int64_t>(x.size())));
  if (act_type == kFloat)
    y.assign(reinterpret_cast<const uint8_t*>(x.data()),
             reinterpret_cast<const uint8_t*>(x.data() + x.size()));
  else
    from_float(x.data(), y.data(), static_cast<int64_t>(x.size()));
  return y;
}

StatusOr<GgmlOracle> GgmlOracle::Load(const std::string& folder, const std::string& only) {
  void* base = dlopen((folder + "/" + kBase).c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (base == nullptr) return NotFound("{}", dlerror());
  GgmlOracle oracle;
  if (!Symbol(base, "ggml_row_size", &oracle.row_size_))
    return NotFound("{} has no ggml_row_size: another version", kBase);
  void* best = nullptr;
  int best_score = 0;
  for (const std::string& variant : Variants(folder)) {
    if (!only.empty() && variant != only) continue;
    void* library = dlopen((folder + "/" + kPrefix + variant + kSuffix).c_str(), RTLD_NOW);
    int (*score)() = nullptr;
    if (library == nullptr || !Symbol(library, "ggml_backend_score", &score)) continue;
    if (const int points = score(); points > best_score) {
      best = library;
      best_score = points;
      oracle.variant_ = variant;
    }
  }
  if (best == nullptr)
    return NotFound("no {}{}{} in {} runs on this CPU", kPrefix, only.empty() ? "*" : only, kSuffix,
                    folder);
  void (*init)() = nullptr;
  if (!Symbol(best, "ggml_cpu_init", &init) ||
      !Symbol(best, "ggml_get_type_traits_cpu", &oracle.traits_))
    return NotFound("{}{}{} lacks the functions this benchmark knows: another version", kPrefix,
                    oracle.variant_, kSuffix);
  init();
  return oracle;
}

bool GgmlOracle::Find(TensorType type, GgmlDot* dot) const {
  const auto* traits = static_cast<const CpuTraits*>(traits_(static_cast<int>(type)));
  if (traits == nullptr || traits->vec_dot == nullptr) return false;
  dot->vec_dot = traits->vec_dot;
  dot->act_type = traits->vec_dot_type;
  dot->row_size = row_size_;
  const auto* act = static_cast<const CpuTraits*>(traits_(traits->vec_dot_type));
  dot->from_float = act->from_float;
  return dot->act_type == 0 || dot->from_float != nullptr;
}

}  // namespace lode::bench
