// How tensors are stored, decided by Python once for each reading, maker, partner and layout.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/types.hpp"
#include "observer/facts.hpp"

namespace pac::engine {

/// A hash over numbers, in order.
class Hash {
 public:
  template <class Number>
  Hash& add(Number number) {
    value_ = (value_ ^ static_cast<size_t>(number)) * 0x9E3779B97F4A7C15ull;
    value_ ^= value_ >> 32;
    return *this;
  }
  size_t value() const { return value_; }

 private:
  size_t value_ = 0;
};

/// What a form is stored for: all that a Storing depends on.
struct StoringKey {
  const PyObject* form;  ///< or the narrower dtype of a cast's source
  at::ScalarType dtype;
  c10::Device device;
  std::int64_t numel;
  bool operator==(const StoringKey& other) const {
    return form == other.form && dtype == other.dtype && device == other.device && numel == other.numel;
  }
};

/// What a form depends on.
struct DecisionKey {
  const PyObject *reading, *maker, *partner;
  at::ScalarType dtype;
  Layout layout;
  bool operator==(const DecisionKey& other) const {
    return reading == other.reading && maker == other.maker && partner == other.partner && dtype == other.dtype &&
           layout == other.layout;
  }
};

struct KeyHash {
  size_t operator()(const StoringKey& key) const {
    return Hash()
        .add(reinterpret_cast<std::uintptr_t>(key.form))
        .add(key.dtype)
        .add(key.device.index())
        .add(key.numel)
        .value();
  }
  size_t operator()(const DecisionKey& key) const {
    Hash hash;
    for (const PyObject* const each : {key.reading, key.maker, key.partner}) {
      hash.add(reinterpret_cast<std::uintptr_t>(each));
    }
    hash.add(key.dtype);
    for (const std::int64_t size : key.layout.sizes) hash.add(size);
    for (const std::int64_t stride : key.layout.strides) hash.add(stride);
    return hash.value();
  }
};

/// A form, with its need at hand.
struct Form {
  Ref object;
  long need = kExact;
};

inline Form form_in(PyObject* object) {
  return {Ref::borrowed(object), static_cast<long>(integer(checked(PyObject_GetAttrString(object, "need")).get()))};
}

/// The decisions of one configuration: Decisions(packing) asks the packing for what it has not seen yet.
///
/// The tables are emptied when full, since old shapes are useless to a model with new shapes each step. An entry holds
/// the objects whose addresses it is found by.
struct Decisions {
  PyObject* self = nullptr;

  /// Return the form in which a tensor is exact enough for its reader.
  Form form(PyObject* packing, PyObject* tensor_object, const at::Tensor& tensor, PyObject* reading,
            const observer::Facts& facts) {
    DecisionKey key{reading, facts.maker, facts.partner, tensor.scalar_type(), Layout::of(tensor)};
    if (facts.repeats) {
      const auto known = forms_.find(key);
      if (known != forms_.end()) return known->second.second;
    }
    const Ref decided =
        checked(PyObject_CallMethod(packing, "form_for", "OOOO", tensor_object, reading, facts.maker, facts.partner));
    Form form = form_in(decided.get());
    if (forms_.size() >= kMost) forms_.clear();
    if (facts.repeats) forms_.emplace(std::move(key), std::make_pair(Ref::borrowed(reading), form));
    return form;
  }

  /// Return how to store a tensor in a form, by a method of the packing; null if no kernel serves the device.
  Ref storing(PyObject* packing, const char* method, const at::Tensor& tensor, PyObject* form) {
    const StoringKey key{form, tensor.scalar_type(), tensor.device(), tensor.numel()};
    auto known = storings_.find(key);
    if (known == storings_.end()) {
      const Ref object(THPVariable_Wrap(tensor));
      Ref made = checked(PyObject_CallMethod(packing, method, "OO", object.get(), form));
      if (made.get() == Py_None) made = Ref();
      if (storings_.size() >= kMost) storings_.clear();
      known = storings_.emplace(key, std::make_pair(Ref::borrowed(form), std::move(made))).first;
    }
    return known->second.second;
  }

 private:
  static constexpr size_t kMost = 4096;
  std::unordered_map<DecisionKey, std::pair<Ref, Form>, KeyHash> forms_;
  std::unordered_map<StoringKey, std::pair<Ref, Ref>, KeyHash> storings_;
};

}  // namespace pac::engine
