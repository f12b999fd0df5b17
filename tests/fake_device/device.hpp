// Declarations that the fake device's operators and its registration with PyTorch share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <vector>

namespace fake {

void resize_storage(const c10::Storage& storage, size_t nbytes);

// Returns a CPU tensor that shares the memory of a device tensor and keeps this memory allocated. The caller must order
// accesses to it.
at::Tensor host_alias(const at::Tensor& tensor);

// Returns the generator of a device's random numbers: a CPU generator with its own state.
const at::Generator& default_generator(int device);

// While an object of this class exists, CPU operators draw from the device's generator, or from the generator passed to
// the call.
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
