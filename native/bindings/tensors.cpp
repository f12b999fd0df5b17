#include "bindings/tensors.hpp"

#include <nanobind/ndarray.h>

#include <algorithm>

#include "bindings/bindings.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

// The first fields of DLPack's DLPackExchangeAPI. They have the same layout in all 1.x versions.
struct Table {
    std::uint32_t major;
    std::uint32_t minor;
    Table* previous;
    void (*allocate)();
    void (*to_owned)();
    void (*from_owned)();
    int (*read)(void* object, nb::dlpack::dltensor* found);  // neither copies nor takes a reference; may be null
};

// The arguments passed to `read_tensors`. The references are never released because calls may run until the process
// exits.
struct TorchObjects {
    const Table* table = nullptr;
    nb::handle tensor, parameter, is_neg, reduction, count_writes;
};

TorchObjects& known() {
    static TorchObjects known;
    return known;
}

void read_tensors(nb::object tensor, nb::object parameter, nb::object reduction, nb::object count_writes) {
    const nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
    const auto* table = capsule.is_none()
                            ? nullptr
                            : static_cast<const Table*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    PyErr_Clear();
    while (table != nullptr && table->major != 1) table = table->previous;
    if (table == nullptr || table->read == nullptr) return;
    const nb::object is_neg = tensor.attr("is_neg");
    known() = {
        table, tensor.release(), parameter.release(), is_neg.inc_ref(), reduction.release(), count_writes.release()};
}

std::optional<DType> dtype_of(const nb::dlpack::dtype& type) {
    if (type.lanes != 1) return std::nullopt;
    const auto is = [&type](nb::dlpack::dtype_code code, int bits) {
        return type.code == static_cast<std::uint8_t>(code) && type.bits == bits;
    };
    using OutcomeCode = nb::dlpack::dtype_code;
    if (is(OutcomeCode::Float, 32)) return DType::f32;
    if (is(OutcomeCode::Bfloat, 16)) return DType::bf16;
    if (is(OutcomeCode::Float, 16)) return DType::f16;
    if (is(OutcomeCode::Float, 64)) return DType::f64;
    if (is(OutcomeCode::Int, 64)) return DType::i64;
    if (is(OutcomeCode::Int, 32)) return DType::i32;
    if (is(OutcomeCode::Int, 16)) return DType::i16;
    if (is(OutcomeCode::Int, 8)) return DType::i8;
    if (is(OutcomeCode::UInt, 8)) return DType::u8;
    if (is(OutcomeCode::Bool, 8)) return DType::boolean;
    return std::nullopt;
}

// Returns the number of elements, or nullopt if the elements are not contiguous in index order.
std::optional<std::uint64_t> dense_count(const nb::dlpack::dltensor& found) {
    std::int64_t count = 1;
    bool is_dense = true;
    for (int i = found.ndim - 1; i >= 0; --i) {
        if (found.shape[i] != 1 && found.strides != nullptr) is_dense = is_dense && found.strides[i] == count;
        count *= found.shape[i];
    }
    return is_dense || count == 0 ? std::optional<std::uint64_t>(count) : std::nullopt;
}

std::uint64_t begin_of(const nb::dlpack::dltensor& found) {
    return reinterpret_cast<std::uintptr_t>(found.data) + found.byte_offset;
}

std::optional<nb::dlpack::dltensor> read(nb::handle object) {
    const TorchObjects& now = known();
    if (now.table == nullptr) return std::nullopt;
    const nb::handle type = object.type();
    if (!type.is(now.tensor) && !type.is(now.parameter)) return std::nullopt;
    nb::dlpack::dltensor found;
    if (now.table->read(object.ptr(), &found) == 0) return found;
    PyErr_Clear();
    return std::nullopt;
}

}  // namespace

std::optional<DenseTensor> read_dense(nb::handle object) {
    const auto found = read(object);
    if (!found || found->device.device_type != nb::device::cpu::value) return std::nullopt;
    const auto dtype = dtype_of(found->dtype);
    const auto count = dense_count(*found);
    const bool has_memory = found->data != nullptr || count == 0U;
    // DLPack does not report whether a tensor is a negative view.
    if (!dtype || !count || !has_memory || !known().is_neg(object).is(Py_False)) return std::nullopt;
    return DenseTensor{begin_of(*found), *count, *dtype};
}

void count_write(nb::handle tensor) {
    known().count_writes(nb::make_tuple(tensor));
}

std::optional<TensorLayout> read_layout(nb::handle tensor) {
    const auto found = read(tensor);
    if (!found || found->strides == nullptr) return std::nullopt;
    if (found->dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Complex)) return std::nullopt;
    if (!known().is_neg(tensor).is(Py_False)) return std::nullopt;
    return TensorLayout{begin_of(*found), found->dtype.code, found->dtype.bits,
                        std::vector<std::int64_t>(found->shape, found->shape + found->ndim),
                        std::vector<std::int64_t>(found->strides, found->strides + found->ndim)};
}

bool has_layout(nb::handle tensor, const TensorLayout& layout) {
    const auto found = read(tensor);
    if (!found || found->strides == nullptr || begin_of(*found) != layout.address) return false;
    if (found->dtype.code != layout.type || found->dtype.bits != layout.bits) return false;
    return std::equal(layout.shape.begin(), layout.shape.end(), found->shape, found->shape + found->ndim) &&
           std::equal(layout.strides.begin(), layout.strides.end(), found->strides, found->strides + found->ndim) &&
           known().is_neg(tensor).is(Py_False);
}

std::optional<ReduceOp> read_reduction(nb::handle object) {
    if (!object.type().is(known().reduction)) return std::nullopt;
    return static_cast<ReduceOp>(nb::cast<int>(object));
}

void register_tensors(nb::module_& module) {
    module.def("read_tensors", &read_tensors);
}

}  // namespace paceline::bindings
