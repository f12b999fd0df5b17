// The fake device without PyTorch's operators: memory that only its kernels may access, streams that run asynchronously
// to the host, and events. All addresses of device memory are in a range without access rights. `Arena::shadow` returns
// the address of the actual bytes. Only jobs in streams, and a host that has waited for the stream, may use these.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace fake {

using Job = std::function<void()>;
using Clock = std::chrono::steady_clock;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
constexpr int kPooledStreams = 32;  // per device, assigned round-robin, as by PyTorch for CUDA

// The number of operations of each kind that a program has run on the device.
struct Counters {
    std::atomic<int64_t> kernels{0};           // operators, both asynchronous and waited for
    std::atomic<int64_t> waiting_kernels{0};   // operators for which the host waited only because this device is simple
    std::atomic<int64_t> copies{0};            // between the host and a device, or between two devices
    std::atomic<int64_t> synchronizations{0};  // host waits that would also occur with a GPU
    std::atomic<int64_t> allocations{0};
    std::atomic<int64_t> events{0};
};
Counters& counters();

// Throws in a process that was forked after its parent had used a device, as CUDA does.
void require_usable();
bool in_bad_fork();

int device_count();
void set_device_count(int count);
int current_device();
int exchange_device(int device);

// A recorded event, which a stream completes.
struct Recording {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false;
    Clock::time_point at;

    void complete();
    bool completed();
    void wait();
};
using RecordingPtr = std::shared_ptr<Recording>;

// A thread that runs jobs in order. A queue is never destroyed, because its thread may outlive the program's last
// statement.
class Queue {
  public:
    Queue(int device, int64_t id) : device_(device), id_(id) {}

    void push(Job job);
    bool empty();
    void drain();  // waits for all earlier jobs; the caller counts the wait if it is a synchronization
    RecordingPtr record();
    void wait_for(RecordingPtr recording);

  private:
    void run();
    void delay();

    const int device_;
    const int64_t id_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Job> jobs_;
    uint64_t pushed_ = 0;
    uint64_t done_ = 0;
    bool running_ = false;
    uint64_t seed_ = 0;
    std::mt19937 random_;
};

Queue& queue(int device, int64_t id);
Queue& current_queue(int device);
int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t id);
int64_t pooled_stream(int device);
void synchronize(int device);

// Makes streams sleep for up to `most_us` microseconds before jobs. The durations are random, and depend on `seed` and
// the stream. 0 disables the delays.
void set_delays(uint64_t seed, int64_t most_us);

// Stores the error of a job that failed asynchronously. The next launch or synchronization throws it, as do all later
// ones.
void fail(const std::string& message);
void throw_failure();

// Releases Python's global interpreter lock during the object's lifetime if this thread holds the lock.
class Unlocked {
  public:
    Unlocked();
    ~Unlocked();
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    void* state_ = nullptr;
};

// Device memory, cached like CUDA's: the stream for which a block was allocated may reuse it as soon as it is freed,
// even if other streams still use it, unless those streams were passed to `use_on`. New and freed bytes are set to
// 0xff, which gives NaN, in stream order.
class Arena {
  public:
    static Arena& get();

    c10::DataPtr allocate(size_t nbytes, int device);
    void use_on(void* context, int64_t stream);
    bool contains(const void* address) const;
    int device_of(const void* address);
    void* shadow(const void* address) const;
    bool in_shadow(const void* address) const;
    void* address_of_shadow(const void* shadow) const;

  private:
    struct Block {
        char* address;
        size_t nbytes;
        int device;
        int64_t stream;
        std::vector<int64_t> users;
    };

    Arena();
    static void release(void* context);
    void give_back(Block* block);

    char* base_ = nullptr;
    char* shadow_ = nullptr;
    std::mutex mutex_;
    size_t used_ = 0;
    std::map<std::tuple<int, int64_t, size_t>, std::vector<Block*>> free_;
    std::map<const char*, Block*> blocks_;
};

// Host memory that asynchronous copies may use.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

}  // namespace fake
