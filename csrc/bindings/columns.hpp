// A recording's events in Python's arrays.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "snapshots/event_columns.hpp"

namespace pac::bindings {

/// The array of a Python object, kept alive.
template <class Value>
class Column {
 public:
  Column(const char* name, const pybind11::object& source) : view_(request(name, source)) {
    if (view_.ndim != 1 || view_.itemsize != sizeof(Value) || !is_integer(view_.format) ||
        (view_.size > 1 && view_.strides[0] != static_cast<pybind11::ssize_t>(sizeof(Value)))) {
      throw pybind11::type_error(std::string(name) + " must be a contiguous array of integers of " +
                                 std::to_string(8 * sizeof(Value)) + " bits, got format '" + view_.format + "'");
    }
  }

  std::size_t count() const { return static_cast<std::size_t>(view_.size); }
  const Value* data() const { return static_cast<const Value*>(view_.ptr); }

 private:
  static pybind11::buffer_info request(const char* name, const pybind11::object& source) {
    if (!pybind11::isinstance<pybind11::buffer>(source)) {
      throw pybind11::type_error(std::string(name) + " must be an array that has the buffer protocol, got " +
                                 std::string(pybind11::str(pybind11::type::handle_of(source).attr("__name__"))));
    }
    return pybind11::reinterpret_borrow<pybind11::buffer>(source).request();
  }
  // Addresses and sizes end below 2^62: signed arrays can be read as unsigned.
  static bool is_integer(const std::string& format) {
    return format.size() == 1 && std::string("BbIiLlQqNn").find(format) != std::string::npos;
  }

  pybind11::buffer_info view_;
};

/// The columns of a recording's events, kept alive. ValueError unless all have one length.
class EventArrays {
 public:
  EventArrays(const pybind11::object& action, const pybind11::object& address, const pybind11::object& size,
              const pybind11::object& stream, const pybind11::object& pool)
      : action_("action", action),
        address_("address", address),
        size_("size", size),
        stream_("stream", stream),
        pool_("pool", pool) {
    for (const std::size_t count : {address_.count(), size_.count(), stream_.count(), pool_.count()}) {
      if (count != action_.count()) throw pybind11::value_error("the columns of the events must have one length");
    }
  }

  alloc::EventColumns columns() const {
    return {action_.count(), action_.data(), address_.data(), size_.data(), stream_.data(), pool_.data()};
  }

 private:
  Column<std::uint8_t> action_;
  Column<std::uint64_t> address_, size_, stream_;
  Column<std::uint32_t> pool_;
};

}  // namespace pac::bindings
