// Reads tensors of PyTorch without their attributes in Python, which take as long as a small all-reduce.
//
// From 2.10 on PyTorch offers C functions for that, in a table that DLPack 1.2 defines (`__dlpack_c_exchange_api__`).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

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

// Returns where the values of a tensor begin, on whatever device it is.
std::uint64_t address_of(nanobind::handle tensor);

// Returns the reduction if `object` is a member of paceline.ReduceOp.
std::optional<ReduceOp> read_reduction(nanobind::handle object);

}  // namespace paceline::bindings
