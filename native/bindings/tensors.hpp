// Reads PyTorch tensors without accessing their Python attributes, because accessing them takes as long as a small
// all-reduce.
//
// Since release 2.10, PyTorch offers C functions for this, in a table defined by DLPack 1.2
// (`__dlpack_c_exchange_api__`).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "reduce/reduce.hpp"

namespace paceline::bindings {

struct DenseTensor {
    std::uint64_t address;
    std::uint64_t count;
    DType dtype;
};

// Returns the memory of `object` if it is a dense, contiguous CPU tensor of class torch.Tensor or torch.nn.Parameter
// whose dtype can be reduced. All other objects must be read in Python. With PyTorch releases before 2.10, this applies
// to all tensors.
std::optional<DenseTensor> read_dense(nanobind::handle object);

// Notifies autograd that a tensor read by `read_dense` was modified.
void count_write(nanobind::handle tensor);

// The address and layout of a tensor's values in memory.
struct TensorLayout {
    std::uint64_t address = 0;
    std::uint8_t type = 0;  // DLPack's type code
    std::uint8_t bits = 0;
    std::vector<std::int64_t> shape;
    std::vector<std::int64_t> strides;
};

// Returns the layout of a tensor on any device, or nullopt if only Python can determine the layout. This is the case
// with PyTorch releases before 2.10, and for complex tensors, because DLPack does not report conjugate views.
std::optional<TensorLayout> read_layout(nanobind::handle tensor);

// Returns true if `tensor` still has the layout that `read_layout` returned for it.
bool has_layout(nanobind::handle tensor, const TensorLayout& layout);

// Returns the reduction if `object` is a member of paceline.ReduceOp.
std::optional<ReduceOp> read_reduction(nanobind::handle object);

}  // namespace paceline::bindings
