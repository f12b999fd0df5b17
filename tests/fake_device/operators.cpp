// The operators of the fake device. Each runs PyTorch's CPU kernel on the bytes behind the device's addresses. If the
// shapes of the results can be computed in advance, the kernel runs asynchronously, as a job in the current stream.
// Otherwise, the host waits for the stream and then runs the kernel.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>

#include "device.hpp"
#include "runtime.hpp"

namespace fake {

namespace {

using c10::IValue;
using torch::jit::Stack;

// Disables autograd and autocast for a call, regardless of what the program has enabled for the CPU.
struct BelowAutograd {
    c10::impl::ExcludeDispatchKeyGuard autograd{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
    c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

bool is_fake(const at::Tensor& tensor) {
    return tensor.defined() && tensor.device().type() == kType;
}

int index_of(const at::Tensor& tensor) {
    return tensor.device().index();
}

c10::DispatchKeySet keys() {
    return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
}

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override { return Arena::get().allocate(nbytes, current_device()); }
    void copy_data(void* target, const void* source, size_t nbytes) const override {
        current_queue(current_device()).push([=] {
            std::memcpy(Arena::get().shadow(target), Arena::get().shadow(source), nbytes);
        });
    }
};

c10::Allocator* allocator() {
    static auto* one = new Allocator;
    return one;
}

struct OnDevice {
    explicit OnDevice(int device) : before(exchange_device(device)) {}
    ~OnDevice() { exchange_device(before); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    int before;
};

at::Tensor empty_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
    OnDevice here(device);
    return at::detail::empty_strided_generic(sizes, strides, allocator(), keys(), type);
}

at::Tensor with_storage(c10::Storage storage, c10::DispatchKeySet key, const at::Tensor& like, int64_t offset) {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, like.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), offset);
    return tensor;
}

// Marks `copy` as a wrapped number if `number` is one, because type promotion treats these differently from tensors.
void keep_wrapped(const at::Tensor& number, const at::Tensor& copy) {
    if (number.unsafeGetTensorImpl()->is_wrapped_number()) {
        copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
}

// Returns a CPU tensor that shares the memory of a device tensor. It does not keep this memory allocated: if a program
// fails to order a job before the reuse of its memory, the job must see the new contents.
at::Tensor bytes_of(const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    c10::DataPtr pointer(Arena::get().shadow(storage.data_ptr().get()), c10::Device(c10::DeviceType::CPU));
    c10::Storage bytes(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), c10::GetCPUAllocator(),
                       true);
    auto alias =
        with_storage(std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor, tensor.storage_offset());
    alias._set_conj(tensor.is_conj());
    alias._set_neg(tensor.is_neg());
    keep_wrapped(tensor, alias);
    return alias;
}

at::Tensor shape_of(const at::Tensor& tensor) {
    auto shape = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    keep_wrapped(tensor, shape);
    return shape;
}

// Returns the value with `change` applied to each tensor in it.
template <typename Change>
IValue changed(const IValue& value, const Change& change) {
    if (value.isTensor()) {
        return change(value.toTensor());
    }
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor tensor : value.toTensorList()) {
            list.push_back(change(tensor));
        }
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
            list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
        }
        return list;
    }
    return value;
}

template <typename Visit>
void each_tensor(const IValue& value, const Visit& visit) {
    changed(value, [&](const at::Tensor& tensor) {
        if (tensor.defined()) {
            visit(tensor);
        }
        return tensor;
    });
}

void resize_to(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
    OnDevice here(index_of(tensor));
    auto* impl = tensor.unsafeGetTensorImpl();
    const auto needed = at::detail::computeStorageNbytes(sizes, strides, tensor.itemsize(), tensor.storage_offset());
    if (tensor.storage().nbytes() < needed) {
        resize_storage(tensor.storage(), needed);
    }
    impl->set_sizes_and_strides(sizes, strides);
}

// A call of an operator with its arguments at the top of a stack.
class Call {
  public:
    Call(const c10::OperatorHandle& asked, const c10::OperatorHandle& kernel, Stack* stack)
        : asked_(asked), kernel_(kernel), stack_(stack) {
        const auto count = kernel.schema().arguments().size();
        arguments_.assign(stack->end() - count, stack->end());
        find_device();
    }

    void run() {
        throw_failure();
        ++counters().kernels;
        if (is_view()) {
            finish(called(at_bytes(false)));
        } else if (must_wait() || !run_behind()) {
            run_after_waiting();
        }
    }

  private:
    const c10::FunctionSchema& schema() const { return kernel_.schema(); }

    void find_device() {
        device_ = current_device();
        bool found = false;
        bool host = false;
        for (const auto& argument : arguments_) {
            each_tensor(argument, [&](const at::Tensor& tensor) {
                if (is_fake(tensor)) {
                    TORCH_CHECK(!found || device_ == index_of(tensor),
                                "Expected all tensors to be on the same device, but ", asked_.schema().name(),
                                " found fake:", device_, " and ", tensor.device());
                    device_ = index_of(tensor);
                    found = true;
                } else if (tensor.dim() > 0) {
                    host = true;
                }
            });
            if (argument.isDevice() && argument.toDevice().type() == kType && argument.toDevice().has_index()) {
                device_ = argument.toDevice().index();
            }
        }
        const auto& name = schema().name();
        TORCH_CHECK(!host || name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0,
                    "Expected all tensors to be on the same device, but ", asked_.schema().name(),
                    " found fake:", device_, " and cpu");
    }

    bool is_view() const {
        for (const auto& result : schema().returns()) {
            if (result.alias_info() == nullptr || result.alias_info()->isWrite()) {
                return false;
            }
        }
        return !schema().returns().empty();
    }

    bool has_tag(at::Tag tag) const {
        const auto tags = kernel_.getTags();
        return std::find(tags.begin(), tags.end(), tag) != tags.end();
    }

    // Returns true if the host would also wait for the result on a GPU.
    bool synchronizes() const {
        for (const auto& result : schema().returns()) {
            const auto kind = result.type()->kind();
            if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) {
                return true;
            }
        }
        if (schema().name().rfind("aten::index", 0) == 0 || schema().name().rfind("aten::_index", 0) == 0) {
            bool mask = false;
            for (const auto& argument : arguments_) {
                if (argument.isOptionalTensorList() || argument.isTensorList()) {
                    each_tensor(argument, [&](const at::Tensor& index) {
                        mask |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
                    });
                }
            }
            return mask;
        }
        return has_tag(at::Tag::dynamic_output_shape) || has_tag(at::Tag::data_dependent_output);
    }

    bool draws_numbers() const {
        for (const auto& argument : schema().arguments()) {
            if (argument.name() == "generator") {
                return true;
            }
        }
        return has_tag(at::Tag::nondeterministic_seeded);
    }

    bool must_wait() const {
        return synchronizes() || draws_numbers() || !kernel_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
    }

    // Returns the arguments for the CPU's kernel. For a job, tensors that the host might change later are copied.
    Stack at_bytes(bool for_job) const {
        Stack stack;
        for (const auto& argument : arguments_) {
            if (argument.isDevice()) {
                stack.emplace_back(c10::Device(c10::DeviceType::CPU));
            } else {
                stack.push_back(changed(argument, [&](const at::Tensor& tensor) {
                    if (is_fake(tensor)) {
                        return bytes_of(tensor);
                    }
                    if (!for_job || !tensor.defined() || !tensor.is_cpu()) {
                        return tensor;
                    }
                    auto copy = tensor.clone();
                    keep_wrapped(tensor, copy);
                    return copy;
                }));
            }
        }
        return stack;
    }

    Stack called(Stack stack) const {
        BelowAutograd below;
        kernel_.callBoxed(&stack);
        return stack;
    }

    bool run_behind() {
        BelowAutograd below;
        Stack shapes;
        for (const auto& argument : arguments_) {
            shapes.push_back(argument.isDevice() ? IValue(c10::Device(c10::DeviceType::Meta))
                                                 : changed(argument, [](const at::Tensor& tensor) {
                                                       return is_fake(tensor) || (tensor.defined() && tensor.dim() > 0)
                                                                  ? shape_of(tensor)
                                                                  : tensor;
                                                   }));
        }
        const auto given = shapes;
        try {
            kernel_.callBoxed(&shapes);
        } catch (const c10::NotImplementedError&) {
            return false;
        }
        adopt_sizes(given);
        std::vector<at::Tensor> results;
        for (size_t at = 0; at < shapes.size(); ++at) {
            if (schema().returns()[at].alias_info() != nullptr) {
                shapes[at] = written(at);
                results.emplace_back();
                continue;
            }
            shapes[at] = changed(shapes[at], [&](const at::Tensor& shape) {
                at::Tensor result;
                if (shape.defined()) {
                    result = empty_on(device_, shape.sizes(), shape.strides(), shape.scalar_type());
                }
                results.push_back(result.defined() ? bytes_of(result) : result);
                return result;
            });
        }
        current_queue(device_).push([kernel = kernel_, stack = at_bytes(true), results = std::move(results)]() mutable {
            BelowAutograd below;
            kernel.callBoxed(&stack);
            size_t at = 0;
            for (const auto& value : stack) {
                changed(value, [&](const at::Tensor& computed) {
                    if (const auto& result = results[at++]; result.defined() && result.numel() > 0) {
                        TORCH_CHECK(result.sizes() == computed.sizes(), kernel.schema().name(), " returned the shape ",
                                    computed.sizes(), ", not ", result.sizes());
                        result.copy_(computed);
                    }
                    return computed;
                });
            }
        });
        drop_arguments(std::move(shapes));
        return true;
    }

    // Resizes `out` arguments to the size of the result, as on every device.
    void adopt_sizes(const Stack& shapes) {
        for (size_t at = 0; at < arguments_.size(); ++at) {
            const auto* alias = schema().arguments()[at].alias_info();
            if (alias != nullptr && alias->isWrite() && arguments_[at].isTensor() &&
                is_fake(arguments_[at].toTensor())) {
                const auto& shape = shapes[at].toTensor();
                const auto& tensor = arguments_[at].toTensor();
                if (shape.sizes() != tensor.sizes() || shape.strides() != tensor.strides()) {
                    resize_to(tensor, shape.sizes(), shape.strides());
                }
            }
        }
    }

    void run_after_waiting() {
        ++counters().waiting_kernels;
        if (synchronizes()) {
            ++counters().synchronizations;
        }
        current_queue(device_).drain();
        throw_failure();
        auto stack = at_bytes(false);
        const auto given = stack;
        if (draws_numbers()) {
            DeviceNumbers numbers(device_, arguments_, &stack);
            finish(called(std::move(stack)));
        } else {
            finish(called(std::move(stack)));
        }
        copy_back(given);
    }

    // Copies back results that are in other memory because the operator resized them.
    void copy_back(const Stack& bytes) {
        for (size_t at = 0; at < arguments_.size(); ++at) {
            if (!arguments_[at].isTensor() || !is_fake(arguments_[at].toTensor())) {
                continue;
            }
            const auto& tensor = arguments_[at].toTensor();
            const auto& computed = bytes[at].toTensor();
            const bool moved = computed.numel() > 0 && !Arena::get().in_shadow(computed.storage().data());
            if (moved || computed.sizes() != tensor.sizes()) {
                resize_to(tensor, computed.sizes(), computed.strides());
            }
            if (moved) {
                current_queue(device_).push([target = bytes_of(tensor), computed] { target.copy_(computed); });
            }
        }
    }

    // Returns the argument that the operator returns as this result, as in-place operators do.
    IValue written(size_t result) const {
        const auto& sets = schema().returns()[result].alias_info()->beforeSets();
        for (size_t at = 0; at < arguments_.size(); ++at) {
            const auto* alias = schema().arguments()[at].alias_info();
            if (alias != nullptr && alias->beforeSets() == sets) {
                return arguments_[at];
            }
        }
        TORCH_CHECK(false, schema().name(), " returns an argument that it does not have");
    }

    at::Tensor to_device(const at::Tensor& computed) const {
        if (!computed.defined() || !computed.is_cpu()) {
            return computed;
        }
        if (Arena::get().in_shadow(computed.storage().data())) {
            return view_of_argument(computed);
        }
        auto result = empty_on(device_, computed.sizes(), computed.strides(), computed.scalar_type());
        if (computed.numel() > 0) {
            current_queue(device_).push([target = bytes_of(result), computed] { target.copy_(computed); });
        }
        return result;
    }

    at::Tensor view_of_argument(const at::Tensor& computed) const {
        at::Tensor view;
        for (const auto& argument : arguments_) {
            each_tensor(argument, [&](const at::Tensor& tensor) {
                if (is_fake(tensor) &&
                    Arena::get().shadow(tensor.storage().data_ptr().get()) == computed.storage().data()) {
                    view = with_storage(tensor.storage(), keys(), computed, computed.storage_offset());
                }
            });
        }
        TORCH_CHECK(view.defined(), schema().name(), " returned a view of none of its arguments");
        return view;
    }

    void finish(Stack results) {
        for (size_t at = 0; at < results.size(); ++at) {
            const auto* alias = schema().returns()[at].alias_info();
            results[at] = alias != nullptr && alias->isWrite()
                              ? written(at)
                              : changed(results[at], [&](const at::Tensor& computed) { return to_device(computed); });
        }
        drop_arguments(std::move(results));
    }

    void drop_arguments(Stack results) {
        stack_->erase(stack_->end() - asked_.schema().arguments().size(), stack_->end());
        for (auto& result : results) {
            stack_->push_back(std::move(result));
        }
    }

    const c10::OperatorHandle& asked_;
    const c10::OperatorHandle& kernel_;
    Stack* stack_;
    Stack arguments_;
    int device_ = 0;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
    Call(op, op, stack).run();
}

c10::OperatorHandle handle(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle& op, Stack* stack) {
    static const auto kernel = handle("aten::convolution");
    Call(op, kernel, stack).run();
}

void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
    static const auto kernel = handle("aten::convolution_backward");
    Stack arguments(stack->end() - op.schema().arguments().size(), stack->end());
    const auto mask = arguments.back().toBoolList();
    IValue bias_sizes;
    if (mask[2]) {
        bias_sizes = c10::List<int64_t>({arguments[0].toTensor().size(1)});
    }
    arguments.insert(arguments.begin() + 3, bias_sizes);
    Call(kernel, kernel, &arguments).run();
    stack->erase(stack->end() - op.schema().arguments().size(), stack->end());
    stack->insert(stack->end(), arguments.begin(), arguments.end());
}

int index_or_current(std::optional<at::Device> device) {
    return device && device->has_index() ? device->index() : current_device();
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    OnDevice here(index_or_current(device));
    return at::detail::empty_generic(sizes, allocator(), keys(), c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    return empty_on(index_or_current(device), sizes, strides, c10::dtype_or_default(type));
}

void copy_to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
    auto& stream = current_queue(index_of(target));
    const bool behind = non_blocking && is_pinned(source.storage().data());
    // Non-pinned memory has already been read when the call returns, so the program may change it afterwards.
    auto kept = behind || !non_blocking ? source : source.clone();
    stream.push([kept = std::move(kept), bytes = bytes_of(target)] {
        BelowAutograd below;
        bytes.copy_(kept);
    });
    if (!non_blocking) {
        ++counters().synchronizations;
        stream.drain();
        throw_failure();
    }
}

void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
    auto& stream = current_queue(index_of(source));
    stream.push([bytes = bytes_of(source), target] {
        BelowAutograd below;
        target.copy_(bytes);
    });
    if (!non_blocking || !is_pinned(target.storage().data())) {
        ++counters().synchronizations;
        stream.drain();
        throw_failure();
    }
}

void copy_on_devices(const at::Tensor& source, const at::Tensor& target) {
    auto& here = current_queue(index_of(source));
    auto& there = current_queue(index_of(target));
    if (&here != &there) {
        here.wait_for(there.record());
    }
    here.push([from = bytes_of(source), to = bytes_of(target)] {
        BelowAutograd below;
        to.copy_(from);
    });
    if (&here != &there) {
        there.wait_for(here.record());
    }
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
    throw_failure();
    if (target.numel() == 0) {
        return target;
    }
    ++(is_fake(source) && is_fake(target) && index_of(source) == index_of(target) ? counters().kernels
                                                                                  : counters().copies);
    BelowAutograd below;
    if (!is_fake(source)) {
        copy_to_device(source, target, non_blocking);
    } else if (!is_fake(target)) {
        copy_to_host(source, target, non_blocking);
    } else {
        copy_on_devices(source, target);
    }
    return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
    if (source.sizes() != target.sizes()) {
        target.resize_(source.sizes());
    }
    return copy_from(source, target, false);
}

at::Tensor as_strided(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
    return at::cpu::as_strided(tensor, sizes, strides, offset);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
    return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor reshape_alias(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
    return at::native::_reshape_alias(tensor, sizes, strides);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef symbolic,
                         std::optional<at::MemoryFormat> format) {
    const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
    if (tensor.sizes() != sizes || format) {
        const auto like = at::empty(sizes, tensor.options().device(at::kMeta).memory_format(format));
        resize_to(tensor, sizes, like.strides());
    }
    return tensor;
}

at::Tensor& set_to(at::Tensor& tensor, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                   at::IntArrayRef strides) {
    return at::cpu::set_(tensor, source, offset, sizes, strides);
}

at::Tensor& set_to_storage(at::Tensor& tensor, at::Storage source) {
    const auto count = static_cast<int64_t>(source.nbytes() / tensor.itemsize());
    return at::cpu::set_(tensor, source, 0, {count}, {1});
}

at::Tensor& set_to_tensor(at::Tensor& tensor, const at::Tensor& source) {
    return at::cpu::set_(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_to_nothing(at::Tensor& tensor) {
    OnDevice here(index_of(tensor));
    c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
    return at::cpu::set_(tensor, storage, 0, {0}, {1});
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
    if (auto* context = tensor.storage().data_ptr().get_context()) {
        Arena::get().use_on(context, stream.id());
    }
}

int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
    return 0;  // the composite implementation, which calls other operators
}

}  // namespace

void resize_storage(const c10::Storage& storage, size_t nbytes) {
    OnDevice here(storage.device().index());
    auto* impl = storage.unsafeGetStorageImpl();
    if (nbytes == impl->nbytes()) {
        return;
    }
    auto next = allocator()->allocate(nbytes);
    const auto kept = std::min(nbytes, impl->nbytes());
    auto& arena = Arena::get();
    if (kept > 0) {
        current_queue(current_device())
            .push([to = arena.shadow(next.get()), from = arena.shadow(impl->data_ptr().get()), kept] {
                std::memcpy(to, from, kept);
            });
    }
    impl->set_data_ptr_noswap(std::move(next));
    impl->set_nbytes(nbytes);
}

at::Tensor host_alias(const at::Tensor& tensor) {
    auto* kept = new c10::Storage(tensor.storage());
    c10::DataPtr pointer(
        Arena::get().shadow(kept->data_ptr().get()), kept,
        [](void* context) { delete static_cast<c10::Storage*>(context); }, c10::Device(c10::DeviceType::CPU));
    c10::Storage bytes(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(pointer), nullptr, false);
    return with_storage(std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor, tensor.storage_offset());
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, allocator());

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("as_strided", as_strided);
    library.impl("view", view);
    library.impl("_reshape_alias", reshape_alias);
    library.impl("resize_", resize);
    library.impl("set_.source_Storage_storage_offset", set_to);
    library.impl("set_.source_Storage", set_to_storage);
    library.impl("set_.source_Tensor", set_to_tensor);
    library.impl("set_", set_to_nothing);
    library.impl("record_stream", record_stream);
    library.impl("_fused_sdp_choice", choose_attention);
    library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
    library.impl("convolution_backward_overrideable",
                 torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
    // If an operator has both a CPU kernel and a composite one, only the CPU kernel gives the same bits as on the CPU.
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
        const auto op = c10::Dispatcher::singleton().findOp(name);
        if (!op || name.name.rfind("aten::", 0) != 0 || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
            continue;
        }
        const bool composite = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
        if (composite &&
            (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || name.name.rfind("aten::_foreach_", 0) == 0)) {
            const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
            library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
        }
    }
}

}  // namespace fake
