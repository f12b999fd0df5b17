// Reads tensors of PyTorch without their attributes in Python, which take as long as a small all-reduce.
//
// From 2.10 on PyTorch offers C functions for that, in a table that DLPack 1.2 defines (`__dlpack_c_exchange_api__`).
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

// Returns where the values of `object` are if it is a dense, contiguous tensor on the CPU, of the class torch.Tensor or
// torch.nn.Parameter and of a type that can be reduced. Everything else is read in Python, as with an older PyTorch.
std::optional<DenseTensor> read_dense(nanobind::handle object);

// Tells autograd that a tensor, which `read_dense` has read, is written to.
void count_write(nanobind::handle tensor);

// Where the values of a tensor are in memory, and how they lie there.
struct TensorLayout {
    std::uint64_t address = 0;
    std::uint8_t type = 0;  // DLPack's
    std::uint8_t bits = 0;
    std::vector<std::int64_t> shape;
    std::vector<std::int64_t> strides;
};

// Returns the layout of a tensor on whatever device it is; nothing where only Python can tell, as with an older
// PyTorch, and with complex numbers, of which DLPack does not say whether they are conjugates.
std::optional<TensorLayout> read_layout(nanobind::handle tensor);

// Returns whether a tensor that `read_layout` could read has this layout.
bool has_layout(nanobind::handle tensor, const TensorLayout& layout);

// Returns the reduction if `object` is a member of paceline.ReduceOp.
std::optional<ReduceOp> read_reduction(nanobind::handle object);

}  // namespace paceline::bindings
