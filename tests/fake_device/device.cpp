// Registers the fake device with PyTorch: its guard (devices, streams, events), its hooks, its generators, and the
// functions that `torch.fake` calls.
#include "device.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Dict.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <mutex>

#include "runtime.hpp"

namespace fake {

namespace {

c10::Device device_at(int device) {
    return {kType, static_cast<c10::DeviceIndex>(device)};
}

int index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
}

c10::Stream stream_of(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

struct Event {
    RecordingPtr recording;
};

Event* event_of(void* event) {
    return static_cast<Event*>(event);
}

// Functions that older versions of PyTorch do not have are declared without `override`.
struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kType; }
    c10::Device exchangeDevice(c10::Device device) const override { return device_at(exchange_device(device.index())); }
    c10::Device getDevice() const override { return device_at(current_device()); }
    void setDevice(c10::Device device) const override { exchange_device(device.index()); }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.index() >= 0 && device.index() < device_count()) {
            exchange_device(device.index());
        }
    }
    c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

    c10::Stream getStream(c10::Device device) const override {
        return stream_of(index_of(device), current_stream(index_of(device)));
    }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return stream_of(index_of(device), pooled_stream(index_of(device)));
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        return stream_of(stream.device_index(), exchange_stream(stream.device_index(), stream.id()));
    }
    bool queryStream(const c10::Stream& stream) const override {
        return queue(stream.device_index(), stream.id()).empty();
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        ++counters().synchronizations;
        queue(stream.device_index(), stream.id()).drain();
        throw_failure();
    }
    void synchronizeDevice(const c10::DeviceIndex device) const {
        ++counters().synchronizations;
        synchronize(device);
        throw_failure();
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        if (data.get_context() != nullptr) {
            Arena::get().use_on(data.get_context(), stream.id());
        }
    }

    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        ++counters().events;
        if (*event == nullptr) {
            *event = new Event;
        }
        event_of(*event)->recording = queue(stream.device_index(), stream.id()).record();
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event != nullptr) {
            queue(stream.device_index(), stream.id()).wait_for(event_of(event)->recording);
        }
    }
    bool queryEvent(void* event) const override { return event == nullptr || event_of(event)->recording->completed(); }
    void synchronizeEvent(void* event) const override {
        ++counters().synchronizations;
        if (event != nullptr) {
            event_of(event)->recording->wait();
        }
        throw_failure();
    }
    double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
        const auto& from = event_of(first)->recording;
        const auto& to = event_of(second)->recording;
        TORCH_CHECK(from->completed() && to->completed(),
                    "both events must be completed before their times are compared");
        return std::chrono::duration<double, std::milli>(to->at - from->at).count();
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete event_of(event); }
};

struct GeneratorImpl final : c10::GeneratorImpl {
    explicit GeneratorImpl(int device, at::Generator numbers = at::detail::createCPUGenerator())
        : c10::GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          numbers(std::move(numbers)) {}

    void set_current_seed(uint64_t seed) override { numbers.set_current_seed(seed); }
    void set_offset(uint64_t) override { TORCH_CHECK(false, "the fake device's generator has no offset"); }
    uint64_t get_offset() const override { TORCH_CHECK(false, "the fake device's generator has no offset"); }
    uint64_t current_seed() const override { return numbers.current_seed(); }
    uint64_t seed() override { return numbers.seed(); }
    void set_state(const c10::TensorImpl& state) override { numbers.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return numbers.unsafeGetGeneratorImpl()->get_state();
    }
    GeneratorImpl* clone_impl() const override { return new GeneratorImpl(device_.index(), numbers.clone()); }

    at::Generator numbers;
};

at::Generator numbers_of(const at::Generator& generator) {
    return generator.device().type() == kType ? static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->numbers
                                              : generator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return device_count() > 0; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device < 0 ? current_device() : device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device = -1) const {
        return at::make_generator<GeneratorImpl>(device < 0 ? current_device() : device);
    }
    at::Device getDeviceFromPtr(void* address) const override { return device_at(Arena::get().device_of(address)); }
    bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
    at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
        resize_storage(storage, nbytes);
    }
    c10::DeviceIndex deviceCount() const { return static_cast<c10::DeviceIndex>(device_count()); }
    void setCurrentDevice(c10::DeviceIndex device) const { exchange_device(device); }
    c10::DeviceIndex getCurrentDevice() const { return static_cast<c10::DeviceIndex>(current_device()); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const {
        return static_cast<c10::DeviceIndex>(exchange_device(device));
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const {
        return device < 0 ? getCurrentDevice() : exchangeDevice(device);
    }
};

std::mutex numbers_mutex;

c10::Dict<std::string, int64_t> counted() {
    const auto& all = counters();
    c10::Dict<std::string, int64_t> names;
    names.insert("kernels", all.kernels);
    names.insert("waiting_kernels", all.waiting_kernels);
    names.insert("copies", all.copies);
    names.insert("synchronizations", all.synchronizations);
    names.insert("allocations", all.allocations);
    names.insert("events", all.events);
    return names;
}

}  // namespace

const at::Generator& default_generator(int device) {
    static auto* generators = new std::vector<at::Generator>([] {
        std::vector<at::Generator> each;
        for (int at = 0; at < kMaxDevices; ++at) {
            each.push_back(at::make_generator<GeneratorImpl>(at));
        }
        return each;
    }());
    return generators->at(device);
}

DeviceNumbers::DeviceNumbers(int device, const torch::jit::Stack& arguments, torch::jit::Stack* stack)
    : own_(numbers_of(default_generator(device))), lock_(numbers_mutex) {
    for (size_t at = 0; at < arguments.size(); ++at) {
        if (arguments[at].isGenerator()) {
            own_ = numbers_of(arguments[at].toGenerator());
            (*stack)[at] = own_;
            return;
        }
    }
    // The operator uses the CPU's default generator, which temporarily has the state of the device's generator.
    auto host = at::detail::getDefaultCPUGenerator();
    host_state_ = host.unsafeGetGeneratorImpl()->get_state();
    host.unsafeGetGeneratorImpl()->set_state(*own_.unsafeGetGeneratorImpl()->get_state());
}

DeviceNumbers::~DeviceNumbers() {
    if (host_state_) {
        auto host = at::detail::getDefaultCPUGenerator();
        own_.unsafeGetGeneratorImpl()->set_state(*host.unsafeGetGeneratorImpl()->get_state());
        host.unsafeGetGeneratorImpl()->set_state(*host_state_);
    }
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY(fake_device, library) {
    library.def("register_hooks() -> ()", [] { at::RegisterPrivateUse1HooksInterface(new Hooks); });
    library.def("set_device_count(int count) -> ()", [](int64_t count) { set_device_count(static_cast<int>(count)); });
    library.def("exchange_device(int device) -> int",
                [](int64_t device) { return static_cast<int64_t>(exchange_device(static_cast<int>(device))); });
    library.def("current_device() -> int", [] { return static_cast<int64_t>(current_device()); });
    library.def("in_bad_fork() -> bool", [] { return in_bad_fork(); });
    library.def("counters() -> Dict(str, int)", &counted);
    library.def("set_delays(int seed, int most_us) -> ()",
                [](int64_t seed, int64_t most_us) { set_delays(static_cast<uint64_t>(seed), most_us); });
    library.def("host_alias(Tensor tensor) -> Tensor", &host_alias);
    library.def("initial_seed(int device) -> int", [](int64_t device) {
        return static_cast<int64_t>(default_generator(static_cast<int>(device)).current_seed());
    });
    library.def("manual_seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
        at::Generator generator = default_generator(static_cast<int>(device));
        generator.set_current_seed(static_cast<uint64_t>(seed));
    });
    library.def("rng_state(int device) -> Tensor", [](int64_t device) {
        return at::Tensor(default_generator(static_cast<int>(device)).unsafeGetGeneratorImpl()->get_state());
    });
    library.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const at::Tensor& state) {
        default_generator(static_cast<int>(device)).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
    });
}

}  // namespace fake

extern "C" {

// Makes `stream` call a host function, in stream order.
void fake_launch(int device, int64_t stream, void (*function)(int64_t), int64_t argument) {
    fake::queue(device, stream).push([=] { function(argument); });
}
}
