#include "runtime.hpp"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>

namespace at {
TORCH_API void init_num_threads();  // declared in ATen/Parallel.h
}

namespace fake {

namespace {

constexpr size_t kArenaBytes = size_t{1} << 35;  // reserved address space, not memory
constexpr size_t kGrain = 512;

std::atomic<bool> used{false};
std::atomic<bool> forked_after_use{false};
std::atomic<int> devices{2};
std::atomic<uint64_t> delay_seed{0};
std::atomic<int64_t> delay_most_us{0};
std::mutex failure_mutex;
std::string failure;

thread_local int device = 0;
thread_local int64_t streams[kMaxDevices] = {};

void after_fork() {
    if (used) {
        forked_after_use = true;
    }
}

void mark_used() {
    static const int registered = pthread_atfork(nullptr, nullptr, &after_fork);
    (void)registered;
    used = true;
}

size_t rounded(size_t nbytes) {
    size_t grain = kGrain;
    while (grain * 16 < nbytes) {
        grain *= 2;
    }
    return (nbytes + grain - 1) / grain * grain;
}

}  // namespace

Counters& counters() {
    static auto* one = new Counters;
    return *one;
}

bool in_bad_fork() {
    return forked_after_use;
}

void require_usable() {
    TORCH_CHECK(!forked_after_use,
                "Cannot re-initialize the fake device in a forked subprocess: its parent had used it before the fork");
    mark_used();
}

int device_count() {
    return devices;
}

void set_device_count(int count) {
    TORCH_CHECK(count >= 0 && count <= kMaxDevices, "the fake device has 0 to ", kMaxDevices, " devices, not ", count);
    devices = count;
}

int current_device() {
    return device;
}

int exchange_device(int next) {
    TORCH_CHECK(next >= 0 && next < devices, "fake:", next, " does not exist: there are ", devices.load(), " devices");
    return std::exchange(device, next);
}

void Recording::complete() {
    std::lock_guard lock(mutex);
    over = true;
    at = Clock::now();
    changed.notify_all();
}

bool Recording::completed() {
    std::lock_guard lock(mutex);
    return over;
}

void Recording::wait() {
    Unlocked unlocked;
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return over; });
}

void Queue::push(Job job) {
    require_usable();
    std::lock_guard lock(mutex_);
    if (!running_) {
        running_ = true;
        std::thread([this] { run(); }).detach();
    }
    jobs_.push_back(std::move(job));
    ++pushed_;
    changed_.notify_all();
}

bool Queue::empty() {
    std::lock_guard lock(mutex_);
    return done_ == pushed_;
}

void Queue::drain() {
    require_usable();
    Unlocked unlocked;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&, until = pushed_] { return done_ >= until; });
}

RecordingPtr Queue::record() {
    auto recording = std::make_shared<Recording>();
    push([recording] { recording->complete(); });
    return recording;
}

void Queue::wait_for(RecordingPtr recording) {
    if (!recording->completed()) {
        push([recording = std::move(recording)] { recording->wait(); });
    }
}

void Queue::run() {
    at::init_num_threads();  // a kernel that is divided among threads may round differently
    exchange_device(device_);
    streams[device_] = id_;
    while (true) {
        Job job;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return !jobs_.empty(); });
            job = std::move(jobs_.front());
            jobs_.pop_front();
        }
        delay();
        try {
            job();
        } catch (const std::exception& error) {
            fail("behind the host, on stream " + std::to_string(id_) + " of fake:" + std::to_string(device_) + ": " +
                 error.what());
        }
        job = nullptr;
        std::lock_guard lock(mutex_);
        ++done_;
        changed_.notify_all();
    }
}

void Queue::delay() {
    const auto most_us = delay_most_us.load();
    if (most_us == 0) {
        return;
    }
    if (const auto seed = delay_seed.load(); seed != seed_) {
        seed_ = seed;
        std::seed_seq mixed{static_cast<int64_t>(seed), id_, static_cast<int64_t>(device_)};
        random_.seed(mixed);
    }
    // Half of the jobs are not delayed: a race occurs only if one side is late and the other is early.
    if (const auto drawn = random_(); drawn % 2 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % most_us));
    }
}

Queue& queue(int device, int64_t id) {
    static auto* mutex = new std::mutex;
    static auto* queues = new std::map<std::pair<int, int64_t>, std::unique_ptr<Queue>>;
    std::lock_guard lock(*mutex);
    auto& one = (*queues)[{device, id}];
    if (!one) {
        one = std::make_unique<Queue>(device, id);
    }
    return *one;
}

int64_t current_stream(int device) {
    return streams[device];
}

int64_t exchange_stream(int device, int64_t id) {
    return std::exchange(streams[device], id);
}

Queue& current_queue(int device) {
    return queue(device, streams[device]);
}

int64_t pooled_stream(int device) {
    static std::atomic<int64_t> next[kMaxDevices];
    return 1 + next[device]++ % kPooledStreams;
}

void synchronize(int device) {
    for (int64_t id = 0; id <= kPooledStreams; ++id) {
        auto& one = queue(device, id);
        if (!one.empty()) {
            one.drain();
        }
    }
}

void set_delays(uint64_t seed, int64_t most_us) {
    delay_seed = seed;
    delay_most_us = most_us;
}

void fail(const std::string& message) {
    std::lock_guard lock(failure_mutex);
    if (failure.empty()) {
        failure = message;
    }
}

void throw_failure() {
    std::lock_guard lock(failure_mutex);
    TORCH_CHECK(failure.empty(), "an operation of the fake device failed ", failure);
}

// The library does not link to Python, so that it can be compiled without Python's headers.
Unlocked::Unlocked() {
    static auto* check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static auto* save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (check != nullptr && check() != 0) {
        state_ = save();
    }
}

Unlocked::~Unlocked() {
    static auto* restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (state_ != nullptr) {
        restore(state_);
    }
}

Arena& Arena::get() {
    static auto* one = new Arena;
    return *one;
}

Arena::Arena() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* base = mmap(nullptr, kArenaBytes, PROT_NONE, flags, -1, 0);
    void* shadow = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    TORCH_CHECK(base != MAP_FAILED && shadow != MAP_FAILED,
                "no addresses for the fake device's memory: ", strerror(errno));
    base_ = static_cast<char*>(base);
    shadow_ = static_cast<char*>(shadow);
}

c10::DataPtr Arena::allocate(size_t nbytes, int device) {
    require_usable();
    const c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    if (nbytes == 0) {
        return {nullptr, where};
    }
    ++counters().allocations;
    const auto size = rounded(nbytes);
    const auto stream = current_stream(device);
    std::lock_guard lock(mutex_);
    auto& fitting = free_[{device, stream, size}];
    Block* block = nullptr;
    if (!fitting.empty()) {
        block = fitting.back();
        fitting.pop_back();
    } else {
        TORCH_CHECK(used_ + size + kGrain <= kArenaBytes, "the fake device is out of memory");
        block = new Block{base_ + used_, size, device, stream, {}};
        used_ += size + kGrain;
        blocks_[block->address] = block;
        std::memset(shadow_ + (block->address - base_), 0xff, size);
    }
    return {block->address, block, &Arena::release, where};
}

void Arena::use_on(void* context, int64_t stream) {
    std::lock_guard lock(mutex_);
    auto* block = static_cast<Block*>(context);
    if (stream != block->stream) {
        block->users.push_back(stream);
    }
}

void Arena::release(void* context) {
    if (forked_after_use) {
        return;
    }
    auto& arena = get();
    auto* block = static_cast<Block*>(context);
    auto& own = queue(block->device, block->stream);
    auto* bytes = arena.shadow(block->address);
    for (const auto user : std::exchange(block->users, {})) {
        own.wait_for(queue(block->device, user).record());
    }
    own.push([bytes, nbytes = block->nbytes] { std::memset(bytes, 0xff, nbytes); });
    arena.give_back(block);
}

void Arena::give_back(Block* block) {
    std::lock_guard lock(mutex_);
    free_[{block->device, block->stream, block->nbytes}].push_back(block);
}

bool Arena::contains(const void* address) const {
    auto* at = static_cast<const char*>(address);
    return at >= base_ && at < base_ + kArenaBytes;
}

bool Arena::in_shadow(const void* address) const {
    auto* at = static_cast<const char*>(address);
    return at >= shadow_ && at < shadow_ + kArenaBytes;
}

int Arena::device_of(const void* address) {
    std::lock_guard lock(mutex_);
    auto next = blocks_.upper_bound(static_cast<const char*>(address));
    TORCH_CHECK(contains(address) && next != blocks_.begin(), "the address is not one of a fake device");
    return std::prev(next)->second->device;
}

void* Arena::shadow(const void* address) const {
    return address == nullptr ? nullptr : shadow_ + (static_cast<const char*>(address) - base_);
}

void* Arena::address_of_shadow(const void* shadow) const {
    return shadow == nullptr ? nullptr : base_ + (static_cast<const char*>(shadow) - shadow_);
}

namespace {

std::mutex pinned_mutex;
std::map<const char*, size_t>& pinned_blocks() {
    static auto* blocks = new std::map<const char*, size_t>;
    return *blocks;
}

void release_pinned(void* address) {
    std::lock_guard lock(pinned_mutex);
    pinned_blocks().erase(static_cast<const char*>(address));
    std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        void* address = nullptr;
        TORCH_CHECK(posix_memalign(&address, 64, std::max<size_t>(nbytes, 1)) == 0, "no host memory");
        std::lock_guard lock(pinned_mutex);
        pinned_blocks()[static_cast<const char*>(address)] = std::max<size_t>(nbytes, 1);
        return {address, address, &release_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
    void copy_data(void* target, const void* source, size_t nbytes) const override {
        std::memcpy(target, source, nbytes);
    }
};

}  // namespace

c10::Allocator* pinned_allocator() {
    static auto* one = new PinnedAllocator;
    return one;
}

bool is_pinned(const void* address) {
    std::lock_guard lock(pinned_mutex);
    auto next = pinned_blocks().upper_bound(static_cast<const char*>(address));
    if (next == pinned_blocks().begin()) {
        return false;
    }
    const auto& [start, nbytes] = *std::prev(next);
    return static_cast<const char*>(address) < start + nbytes;
}

}  // namespace fake
