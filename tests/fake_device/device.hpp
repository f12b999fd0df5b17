// The fake device as PyTorch knows it: what its operators and its registration share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <vector>

namespace fake {

void resize_storage(const c10::Storage& storage, size_t nbytes);

// The bytes of a tensor of the device, as a tensor of the CPU that keeps them. Whoever uses it has ordered that.
at::Tensor host_alias(const at::Tensor& tensor);

// The generator of a device's random numbers: the CPU's, with a state of its own.
const at::Generator& default_generator(int device);

// While it lives, operators of the CPU draw from the device's generator, or from that of the call's arguments.
class DeviceNumbers {
  public:
    DeviceNumbers(int device, const torch::jit::Stack& arguments, torch::jit::Stack* stack);
    ~DeviceNumbers();
    DeviceNumbers(const DeviceNumbers&) = delete;
    DeviceNumbers& operator=(const DeviceNumbers&) = delete;

  private:
    at::Generator own_;
    c10::intrusive_ptr<c10::TensorImpl> host_state_;
    std::unique_lock<std::mutex> lock_;
};

}  // namespace fake
