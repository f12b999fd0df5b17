// Mixed precision: within `torch.autocast("fake")`, matrix products run in the lower precision, and operators that
// would lose accuracy in it run in float32, as on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "runtime.hpp"

namespace at::autocast {
// Declared in ATen/autocast_mode.h, which is slow to compile.
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API at::Tensor cached_cast(at::ScalarType to_type, const at::Tensor& arg, c10::DeviceType device_type);
}  // namespace at::autocast

namespace fake {

namespace {

constexpr const char* kLower[] = {
    "linear",    "matmul",  "mm",     "bmm",    "mv",     "addmm",       "addmv", "addbmm",
    "baddbmm",   "einsum",  "conv1d", "conv2d", "conv3d", "convolution", "prelu", "scaled_dot_product_attention",
    "lstm_cell", "gru_cell"};
constexpr const char* kFull[] = {"exp",
                                 "log",
                                 "log_softmax.int",
                                 "softmax.int",
                                 "cumsum",
                                 "layer_norm",
                                 "group_norm",
                                 "mse_loss",
                                 "l1_loss",
                                 "nll_loss",
                                 "softplus",
                                 "cross_entropy_loss",
                                 "smooth_l1_loss",
                                 "kl_div",
                                 "sum",
                                 "sum.dim_IntList",
                                 "prod",
                                 "pow.Tensor_Scalar",
                                 "binary_cross_entropy_with_logits"};

at::Tensor cast(const at::Tensor& tensor, at::ScalarType type) {
    return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble &&
                   tensor.device().type() == kType
               ? at::autocast::cached_cast(type, tensor, kType)
               : tensor;
}

void call_in(at::ScalarType type, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
    for (auto at = stack->end() - op.schema().arguments().size(); at != stack->end(); ++at) {
        if (at->isTensor()) {
            *at = cast(at->toTensor(), type);
        } else if (at->isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor tensor : at->toTensorList()) {
                list.push_back(cast(tensor, type));
            }
            *at = std::move(list);
        }
    }
    op.callBoxed(stack);
}

void call_in_lower(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    call_in(at::autocast::get_autocast_dtype(kType), op, stack);
}

void call_in_full(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    call_in(at::kFloat, op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
    for (const auto* name : kLower) {
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_in_lower>());
    }
    for (const auto* name : kFull) {
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_in_full>());
    }
}

}  // namespace fake
