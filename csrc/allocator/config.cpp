#include "allocator/config.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iomanip>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <vector>

namespace pac::alloc {
namespace {

constexpr Bytes kKiB = 1_KiB, kMiB = 1_MiB, kGiB = 1024_MiB;

template <class... Parts>
[[noreturn]] void reject(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

std::string_view trim(std::string_view text) {
  const auto space = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
  while (!text.empty() && space(text.front())) text.remove_prefix(1);
  while (!text.empty() && space(text.back())) text.remove_suffix(1);
  return text;
}

/// The parts between commas that stand outside brackets, trimmed.
std::vector<std::string_view> split_at_commas(std::string_view text) {
  std::vector<std::string_view> parts;
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || (text[i] == ',' && depth == 0)) {
      parts.push_back(trim(text.substr(begin, i - begin)));
      begin = i + 1;
    } else if (text[i] == '[') {
      ++depth;
    } else if (text[i] == ']') {
      --depth;
    }
  }
  return parts;
}

/// Reads the whole text as a number of its type; false where it is none, or does not fit.
template <class Number>
bool read_number(std::string_view text, Number& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

bool is_power_of_two(std::uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

using Divisions = decltype(Config::roundup_power2_divisions);

std::uint32_t parse_division(std::string_view text) {
  std::uint32_t divisions = 0;
  if (!read_number(text, divisions) || (divisions != 0 && !is_power_of_two(divisions))) {
    reject("roundup_power2_divisions takes a power of two, or 0 for no rounding, got '", text, "'");
  }
  return divisions;
}

/// The interval from 1 MiB is 0; sizes beyond the last interval belong to it.
std::size_t interval_of(std::string_view boundary) {
  std::uint64_t mebibytes = 0;
  if (!read_number(boundary, mebibytes) || !is_power_of_two(mebibytes)) {
    reject("roundup_power2_divisions: an interval begins at a power of two in MiB, or is '>' for all larger, got '",
           boundary, "'");
  }
  std::size_t interval = 0;
  while (mebibytes >>= 1) ++interval;
  return std::min(interval, Divisions().size() - 1);
}

/// As PyTorch does: the first interval's divisions hold below it too, '>' fills what follows the last one named, and an
/// interval that nothing names is not divided.
Divisions parse_divisions(std::string_view value) {
  Divisions divisions{};
  if (value.empty() || value.front() != '[') {
    divisions.fill(parse_division(value));
    return divisions;
  }
  if (value.back() != ']') reject("roundup_power2_divisions: the list '", value, "' has no closing ']'");
  std::size_t last = 0;
  bool first = true;
  for (const std::string_view item : split_at_commas(value.substr(1, value.size() - 2))) {
    const std::size_t colon = item.find(':');
    if (colon == std::string_view::npos) {
      reject("roundup_power2_divisions: expected MiB:divisions, as in [256:1,512:2,>:8], got '", item, "'");
    }
    const std::string_view boundary = trim(item.substr(0, colon));
    const std::uint32_t count = parse_division(trim(item.substr(colon + 1)));
    if (boundary == ">") {
      std::fill(divisions.begin() + static_cast<std::ptrdiff_t>(last) + 1, divisions.end(), count);
      continue;
    }
    last = interval_of(boundary);
    if (first) std::fill_n(divisions.begin(), last, count);
    divisions[last] = count;
    first = false;
  }
  return divisions;
}

using Apply = void (*)(Config&, std::string_view key, std::string_view value);

template <Bytes Config::* Field>
void set_bytes(Config& config, std::string_view key, std::string_view value) {
  try {
    config.*Field = parse_bytes(value);
  } catch (const std::invalid_argument& error) {
    reject(key, ": ", error.what());
  }
}

template <Bytes Config::* Field>
void set_mebibytes(Config& config, std::string_view key, std::string_view value) {
  Bytes mebibytes = 0;
  if (!read_number(value, mebibytes) || mebibytes > kUnlimited / kMiB) {
    reject(key, " takes a whole number of MiB, got '", value, "'");
  }
  config.*Field = mebibytes * kMiB;
}

template <double Config::* Field>
void set_fraction(Config& config, std::string_view key, std::string_view value) {
  if (!read_number(value, config.*Field)) reject(key, " takes a number from 0 to 1, got '", value, "'");
}

void set_growth(Config& config, std::string_view key, std::string_view value) {
  if (value != "vmm" && value != "malloc") reject(key, " is 'vmm' or 'malloc', got '", value, "'");
  config.growth = value == "vmm" ? Growth::kVmm : Growth::kMalloc;
}

void set_expandable_segments(Config& config, std::string_view key, std::string_view value) {
  if (value != "True" && value != "False") reject(key, " is 'True' or 'False', got '", value, "'");
  config.growth = value == "True" ? Growth::kVmm : Growth::kMalloc;
}

void set_divisions(Config& config, std::string_view, std::string_view value) {
  config.roundup_power2_divisions = parse_divisions(value);
}

struct Key {
  std::string_view name;
  std::string_view setting;  ///< keys of one setting exclude each other
  Apply apply;
};

constexpr Key kKeys[] = {
    {"growth", "growth", set_growth},
    {"expandable_segments", "growth", set_expandable_segments},
    {"max_split_size", "max_split_size", set_bytes<&Config::max_split_size>},
    {"max_split_size_mb", "max_split_size", set_mebibytes<&Config::max_split_size>},
    {"max_non_split_rounding", "max_non_split_rounding", set_bytes<&Config::max_non_split_rounding>},
    {"max_non_split_rounding_mb", "max_non_split_rounding", set_mebibytes<&Config::max_non_split_rounding>},
    {"large_segment_size", "large_segment_size", set_bytes<&Config::large_segment_size>},
    {"large_segment_size_mb", "large_segment_size", set_mebibytes<&Config::large_segment_size>},
    {"roundup_power2_divisions", "roundup_power2_divisions", set_divisions},
    {"garbage_collection_threshold", "garbage_collection_threshold",
     set_fraction<&Config::garbage_collection_threshold>},
    {"memory_fraction", "memory_fraction", set_fraction<&Config::memory_fraction>},
    {"per_process_memory_fraction", "memory_fraction", set_fraction<&Config::memory_fraction>},
    {"initial_pool_size", "initial_pool_size", set_bytes<&Config::initial_pool_size>},
    {"initial_pool_size_mb", "initial_pool_size", set_mebibytes<&Config::initial_pool_size>},
};

/// PyTorch's keys that mean nothing here, and what to do with each.
constexpr struct {
  std::string_view name, advice;
} kForeignKeys[] = {
    {"backend", "it chooses among PyTorch's own allocators, which this one replaces: leave it out"},
    {"release_lock_on_cudamalloc", "it is the native allocator's: leave it out"},
    {"release_lock_on_hipmalloc", "it is the native allocator's: leave it out"},
    {"graph_capture_record_stream_reuse",
     "memory recorded on other streams is reused after the capture only: leave it out"},
    {"throw_on_cudamalloc_oom", "an allocation that fails always raises out of memory: leave it out"},
    {"expandable_segments_reserve", "addresses are reserved as they are needed: leave it out"},
    {"expandable_segments_reserve_by_class", "addresses are reserved as they are needed: leave it out"},
};
constexpr std::string_view kHostPrefix = "pinned_";

const Key& find_key(std::string_view name) {
  for (const Key& key : kKeys) {
    if (key.name == name) return key;
  }
  for (const auto& foreign : kForeignKeys) {
    if (foreign.name == name) reject("PyTorch's setting '", name, "' has no use in this allocator: ", foreign.advice);
  }
  if (name.substr(0, kHostPrefix.size()) == kHostPrefix) {
    reject("PyTorch's setting '", name,
           "' is about host memory, which this allocator leaves to PyTorch: put it in PYTORCH_ALLOC_CONF");
  }
  std::string accepted;
  for (const Key& key : kKeys) accepted.append(accepted.empty() ? "" : ", ").append(key.name);
  reject("unknown setting '", name, "'; accepted are ", accepted);
}

std::string shortest(double value) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
}

std::string divisions_text(const Divisions& divisions) {
  if (std::all_of(divisions.begin(), divisions.end(), [&](std::uint32_t d) { return d == divisions[0]; })) {
    return std::to_string(divisions[0]);
  }
  std::string text;
  for (std::size_t i = 0; i < divisions.size(); ++i) {
    text.append(i == 0 ? "[" : ",").append(std::to_string(1u << i)).append(":").append(std::to_string(divisions[i]));
  }
  return text + "]";
}

}  // namespace

bool operator==(const Config& a, const Config& b) {
  return a.growth == b.growth && a.max_split_size == b.max_split_size &&
         a.max_non_split_rounding == b.max_non_split_rounding && a.large_segment_size == b.large_segment_size &&
         a.roundup_power2_divisions == b.roundup_power2_divisions &&
         a.garbage_collection_threshold == b.garbage_collection_threshold && a.memory_fraction == b.memory_fraction &&
         a.initial_pool_size == b.initial_pool_size;
}

Config parse_config(std::string_view text, Config base) {
  if (trim(text).empty()) return base;
  std::vector<const Key*> seen;
  for (const std::string_view entry : split_at_commas(text)) {
    const std::size_t colon = entry.find(':');
    if (colon == std::string_view::npos) {
      reject("expected key:value,key:value, got '", entry, "' in '", text, "'");
    }
    const std::string_view name = trim(entry.substr(0, colon));
    const Key& key = find_key(name);
    for (const Key* earlier : seen) {
      if (earlier->setting != key.setting) continue;
      if (earlier == &key) reject("'", name, "' is given twice in '", text, "'");
      reject("'", earlier->name, "' and '", name, "' are the same setting, and '", text, "' gives both");
    }
    seen.push_back(&key);
    key.apply(base, name, trim(entry.substr(colon + 1)));
  }
  validate(base);
  return base;
}

void validate(const Config& config) {
  // PyTorch's bounds, and the granularity of handles.
  if (config.large_segment_size <= 10_MiB || config.large_segment_size % 2_MiB != 0) {
    reject("large_segment_size must be a multiple of 2 MiB above 10 MiB, got ", config.large_segment_size, " bytes");
  }
  if (config.max_split_size < config.large_segment_size) {
    reject("max_split_size must be at least large_segment_size, ", format_bytes(config.large_segment_size), ", got ",
           format_bytes(config.max_split_size));
  }
  if (config.max_non_split_rounding < 20_MiB) {
    reject("max_non_split_rounding must be at least 20 MiB, got ", format_bytes(config.max_non_split_rounding));
  }
  for (const std::uint32_t divisions : config.roundup_power2_divisions) {
    if (divisions != 0 && !is_power_of_two(divisions)) {
      reject("roundup_power2_divisions must be powers of two, or 0 for no rounding, got ", divisions);
    }
  }
  const double threshold = config.garbage_collection_threshold;
  if (!(threshold >= 0 && threshold < 1)) {
    reject("garbage_collection_threshold must be above 0 and below 1, or 0 for never, got ", threshold);
  }
  if (!(config.memory_fraction >= 0 && config.memory_fraction <= 1)) {
    reject("memory_fraction must be from 0 to 1, got ", config.memory_fraction);
  }
}

std::string to_string(const Config& config) {
  const Config defaults;
  std::string text;
  const auto add = [&](std::string_view key, const std::string& value) {
    text.append(text.empty() ? "" : ",").append(key).append(":").append(value);
  };
  const auto add_bytes = [&](std::string_view key, Bytes value, Bytes usual) {
    if (value == usual) return;
    const bool whole = value % kMiB == 0;
    add(std::string(key) + (whole ? "_mb" : ""), std::to_string(whole ? value / kMiB : value));
  };
  if (config.growth != defaults.growth) add("growth", config.growth == Growth::kVmm ? "vmm" : "malloc");
  add_bytes("max_split_size", config.max_split_size, defaults.max_split_size);
  add_bytes("max_non_split_rounding", config.max_non_split_rounding, defaults.max_non_split_rounding);
  add_bytes("large_segment_size", config.large_segment_size, defaults.large_segment_size);
  if (config.roundup_power2_divisions != defaults.roundup_power2_divisions) {
    add("roundup_power2_divisions", divisions_text(config.roundup_power2_divisions));
  }
  if (config.garbage_collection_threshold != defaults.garbage_collection_threshold) {
    add("garbage_collection_threshold", shortest(config.garbage_collection_threshold));
  }
  if (config.memory_fraction != defaults.memory_fraction) add("memory_fraction", shortest(config.memory_fraction));
  add_bytes("initial_pool_size", config.initial_pool_size, defaults.initial_pool_size);
  return text;
}

Bytes parse_bytes(std::string_view text) {
  const std::string_view trimmed = trim(text);
  const std::size_t digits = std::min(trimmed.find_first_not_of("0123456789."), trimmed.size());
  const std::string_view number = trimmed.substr(0, digits), unit = trim(trimmed.substr(digits));
  constexpr struct {
    std::string_view name;
    Bytes size;
  } kUnits[] = {{"", 1},
                {"B", 1},
                {"KiB", kKiB},
                {"MiB", kMiB},
                {"GiB", kGiB},
                {"TiB", kKiB * kGiB},
                {"KB", 1'000},
                {"MB", 1'000'000},
                {"GB", 1'000'000'000},
                {"TB", 1'000'000'000'000}};
  const auto* found =
      std::find_if(std::begin(kUnits), std::end(kUnits), [&](auto& known) { return known.name == unit; });
  Bytes whole = 0;
  double fraction = 0;
  const std::size_t point = std::min(number.find('.'), number.size());
  const bool fractional = point != number.size();
  const bool malformed = found == std::end(kUnits) || !read_number(number.substr(0, point), whole) ||
                         (fractional && (found->size == 1 || !read_number(number.substr(point), fraction)));
  if (malformed || whole > (kUnlimited - found->size) / found->size) {
    reject("expected a size below 2^64 bytes such as 536870912, 512MiB, 1.5GiB or 20 MB, got '", text, "'");
  }
  return whole * found->size + static_cast<Bytes>(std::llround(fraction * static_cast<double>(found->size)));
}

std::string format_bytes(Bytes size) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2);
  const auto value = static_cast<double>(size);
  if (size <= kKiB) {
    text << size << " bytes";
  } else if (size <= kMiB) {
    text << value / static_cast<double>(kKiB) << " KiB";
  } else if (size <= kGiB) {
    text << value / static_cast<double>(kMiB) << " MiB";
  } else {
    text << value / static_cast<double>(kGiB) << " GiB";
  }
  return text.str();
}

}  // namespace pac::alloc
