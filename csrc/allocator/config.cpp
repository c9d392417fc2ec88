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

/// Splits at the commas outside brackets, and trims the parts.
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

/// Reads the whole text as a Number; false if malformed or out of range.
template <class Number>
bool read_number(std::string_view text, Number& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

std::uint32_t parse_division(std::string_view text) {
  std::uint32_t divisions = 0;
  if (!read_number(text, divisions) || (divisions != 0 && !is_power_of_two(divisions))) {
    reject("roundup_power2_divisions takes a power of two, or 0 for no rounding, got '", text, "'");
  }
  return divisions;
}

/// Interval 0 begins at 1 MiB; sizes beyond the last interval count as the last.
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

/// As PyTorch: the first named interval's divisions hold below that interval too, '>' fills the intervals after the
/// last named one, and unnamed intervals are not divided.
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

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;

/// Parses the text of a key into the setting's field.
void set(Config& config, const Setting& setting, std::string_view key, std::string_view value) {
  std::visit(Overloaded{[&](Growth Config::* field) {
                          const bool by_alias = key == setting.alias;
                          const std::string_view vmm = by_alias ? "True" : "vmm",
                                                 malloc = by_alias ? "False" : "malloc";
                          if (value != vmm && value != malloc) {
                            reject(key, " is '", vmm, "' or '", malloc, "', got '", value, "'");
                          }
                          config.*field = value == vmm ? Growth::kVmm : Growth::kMalloc;
                        },
                        [&](Bytes Config::* field) {
                          if (key == setting.name) {
                            try {
                              config.*field = parse_bytes(value);
                            } catch (const std::invalid_argument& error) {
                              reject(key, ": ", error.what());
                            }
                            return;
                          }
                          Bytes mebibytes = 0;
                          if (!read_number(value, mebibytes) || mebibytes > kUnlimited / kMiB) {
                            reject(key, " takes a whole number of MiB, got '", value, "'");
                          }
                          config.*field = mebibytes * kMiB;
                        },
                        [&](double Config::* field) {
                          if (!read_number(value, config.*field)) {
                            reject(key, " takes a number from 0 to 1, got '", value, "'");
                          }
                        },
                        [&](bool Config::* field) {
                          if (value != "True" && value != "False") {
                            reject(key, " is 'True' or 'False', got '", value, "'");
                          }
                          config.*field = value == "True";
                        },
                        [&](Divisions Config::* field) { config.*field = parse_divisions(value); }},
             setting.field);
}

constexpr std::string_view kHostPrefix = "pinned_";

const Setting& find_setting(std::string_view key) {
  std::string accepted;
  for (const Setting& setting : kSettings) {
    for (const std::string& each : setting.keys()) {
      if (each == key) return setting;
      accepted.append(accepted.empty() ? "" : ", ").append(each);
    }
  }
  for (const ForeignKey& foreign : kForeignKeys) {
    if (foreign.name == key) {
      reject("PyTorch's setting '", key, "' has no use in this allocator: ", foreign.reason, ": leave it out");
    }
  }
  if (key.substr(0, kHostPrefix.size()) == kHostPrefix) {
    reject("PyTorch's setting '", key,
           "' is about host memory, which this allocator leaves to PyTorch: put it in PYTORCH_ALLOC_CONF");
  }
  reject("unknown setting '", key, "'; accepted are ", accepted);
}

std::string text_of(Growth growth) { return growth == Growth::kVmm ? "vmm" : "malloc"; }

std::string text_of(Bytes size) { return size % kMiB == 0 ? format_bytes(size) : std::to_string(size) + " bytes"; }

std::string text_of(bool value) { return value ? "True" : "False"; }

std::string text_of(double value) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
}

std::string text_of(const Divisions& divisions) {
  if (std::all_of(divisions.begin(), divisions.end(), [&](std::uint32_t d) { return d == divisions[0]; })) {
    return std::to_string(divisions[0]);
  }
  std::string text;
  for (std::size_t i = 0; i < divisions.size(); ++i) {
    text.append(i == 0 ? "[" : ",").append(std::to_string(1u << i)).append(":").append(std::to_string(divisions[i]));
  }
  return text + "]";
}

std::string text_of(const Config& config, const Setting& setting) {
  return std::visit([&](auto field) { return text_of(config.*field); }, setting.field);
}

}  // namespace

std::vector<std::string> Setting::keys() const {
  std::vector<std::string> keys{std::string(name)};
  if (std::holds_alternative<Bytes Config::*>(field)) keys.push_back(keys[0] + "_mb");
  if (!alias.empty()) keys.emplace_back(alias);
  return keys;
}

bool operator==(const Config& a, const Config& b) {
  return std::all_of(std::begin(kSettings), std::end(kSettings), [&](const Setting& setting) {
    return std::visit([&](auto field) { return a.*field == b.*field; }, setting.field);
  });
}

Config parse_config(std::string_view text, Config base) {
  if (trim(text).empty()) return base;
  std::vector<std::pair<const Setting*, std::string_view>> seen;
  for (const std::string_view entry : split_at_commas(text)) {
    const std::size_t colon = entry.find(':');
    if (colon == std::string_view::npos) {
      reject("expected key:value,key:value, got '", entry, "' in '", text, "'");
    }
    const std::string_view key = trim(entry.substr(0, colon));
    const Setting& setting = find_setting(key);
    for (const auto& [other, earlier] : seen) {
      if (other != &setting) continue;
      if (earlier == key) reject("'", key, "' is given twice in '", text, "'");
      reject("'", earlier, "' and '", key, "' are the same setting, and '", text, "' gives both");
    }
    seen.emplace_back(&setting, key);
    set(base, setting, key, trim(entry.substr(colon + 1)));
  }
  validate(base);
  return base;
}

void validate(const Config& config) {
  for (const Setting& setting : kSettings) {
    if (setting.in_range(config)) continue;
    std::string range(setting.range);
    for (const Setting& other : kSettings) {
      if (range.find(other.name) != std::string::npos) range += ", " + text_of(config, other);
    }
    reject(setting.name, " must be ", range, ", got ", text_of(config, setting));
  }
}

std::string to_string(const Config& config) {
  const Config defaults;
  std::string text;
  const auto add = [&](const Setting& setting, std::string_view suffix, const std::string& value) {
    text.append(text.empty() ? "" : ",").append(setting.name).append(suffix).append(":").append(value);
  };
  for (const Setting& setting : kSettings) {
    std::visit(Overloaded{[&](Bytes Config::* field) {
                            const Bytes size = config.*field;
                            if (size == defaults.*field) return;
                            const bool whole = size % kMiB == 0;
                            add(setting, whole ? "_mb" : "", std::to_string(whole ? size / kMiB : size));
                          },
                          [&](auto field) {
                            if (config.*field != defaults.*field) add(setting, "", text_of(config.*field));
                          }},
               setting.field);
  }
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
  // A fraction may round up to a whole unit.
  if (malformed || whole > (kUnlimited - (fractional ? found->size : 0)) / found->size) {
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
