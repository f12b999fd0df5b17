// Bindings for the packing and unpacking kernels, used by tests and measurements.
#include "wire/wire.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/calls.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

constexpr SimdLevel kLevels[] = {SimdLevel::baseline, SimdLevel::avx2, SimdLevel::avx512};

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (const SimdLevel level : kLevels)
        if (has_simd(level)) names.emplace_back(name_of(level));
    return names;
}

WireType to_wire(int wire) {
    if (wire < 0 || wire > static_cast<int>(WireType::int4)) throw nb::value_error("there is no such wire");
    return static_cast<WireType>(wire);
}

const WireKernels& kernels(int wire, const std::string& level, int dtype) {
    for (const SimdLevel each : kLevels) {
        if (level != name_of(each)) continue;
        if (const auto* found = find_wire_kernels(to_wire(wire), to_dtype(dtype), each)) return *found;
    }
    throw nb::value_error("this machine has no such kernels");
}

void pack(int wire, const std::string& level, int dtype, std::uintptr_t tensor, std::uintptr_t residual,
          std::uintptr_t packed, std::size_t count) {
    kernels(wire, level, dtype)
        .pack(reinterpret_cast<const void*>(tensor), reinterpret_cast<float*>(residual),
              reinterpret_cast<std::uint8_t*>(packed), count);
}

void unpack(int wire, const std::string& level, int dtype, std::uintptr_t packed, std::uintptr_t tensor,
            std::size_t count) {
    kernels(wire, level, dtype)
        .unpack(reinterpret_cast<const std::uint8_t*>(packed), reinterpret_cast<void*>(tensor), count);
}

void add_packed(int wire, const std::string& level, int dtype, std::uintptr_t packed, std::uintptr_t tensor,
                std::size_t count, int divisor) {
    kernels(wire, level, dtype)
        .add(reinterpret_cast<const std::uint8_t*>(packed), reinterpret_cast<void*>(tensor), count, divisor);
}

}  // namespace

void register_wire(nb::module_& module) {
    module.def("wire_levels", &levels);
    module.def(
        "packed_size", [](int wire, std::size_t count) { return packed_size(to_wire(wire), count); }, nb::arg("wire"),
        nb::arg("count"));
    module.def("pack", &pack, nb::arg("wire"), nb::arg("level"), nb::arg("dtype"), nb::arg("tensor"),
               nb::arg("residual"), nb::arg("packed"), nb::arg("count"), nb::call_guard<nb::gil_scoped_release>());
    module.def("unpack", &unpack, nb::arg("wire"), nb::arg("level"), nb::arg("dtype"), nb::arg("packed"),
               nb::arg("tensor"), nb::arg("count"), nb::call_guard<nb::gil_scoped_release>());
    module.def("add_packed", &add_packed, nb::arg("wire"), nb::arg("level"), nb::arg("dtype"), nb::arg("packed"),
               nb::arg("tensor"), nb::arg("count"), nb::arg("divisor"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace paceline::bindings
