// How bytes travel between ranks: through a file that all ranks map, with a ring from each rank to each other rank.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace stub {

constexpr size_t RING_BYTES = 1 << 16;
constexpr int MOST_RANKS = 8;

struct Ring {
    std::atomic<uint64_t> written, read;
    char bytes[RING_BYTES];
};

struct Region {
    std::atomic<int> arrived;
    Ring rings[1];  // the ring from rank r to rank s is number r * size + s
};

struct Communicator {
    Region* region = nullptr;
    int rank = 0, size = 0;
    std::atomic<int> polls{0};
    std::atomic<bool> ready{false}, aborted{false}, failed{false}, finalized{false};

    Ring& ring(int from, int to) const { return region->rings[from * size + to]; }
};

struct Transfer {
    bool sends;
    int peer;
    char* memory;
    size_t left;
};

struct Job {
    std::vector<Transfer> transfers;
    std::vector<std::function<void()>> finish;
    std::vector<std::shared_ptr<std::vector<char>>> kept;
    bool is_lost = false;

    char* keep(const void* source, size_t nbytes) {
        kept.push_back(std::make_shared<std::vector<char>>(nbytes));
        if (source != nullptr && nbytes > 0) {
            std::memcpy(kept.back()->data(), source, nbytes);
        }
        return kept.back()->data();
    }
};

inline size_t advance(const Communicator& comm, Transfer& transfer) {
    Ring& ring = transfer.sends ? comm.ring(comm.rank, transfer.peer) : comm.ring(transfer.peer, comm.rank);
    const uint64_t written = ring.written.load(std::memory_order_acquire);  // of the sender below
    const uint64_t read = ring.read.load(std::memory_order_acquire);        // of the receiver below
    const uint64_t at = transfer.sends ? written : read;
    const size_t possible = transfer.sends ? RING_BYTES - (written - read) : written - read;
    const size_t nbytes = std::min({transfer.left, possible, RING_BYTES - at % RING_BYTES});
    char* there = ring.bytes + at % RING_BYTES;
    std::memcpy(transfer.sends ? there : transfer.memory, transfer.sends ? transfer.memory : there, nbytes);
    transfer.memory += nbytes;
    transfer.left -= nbytes;
    (transfer.sends ? ring.written : ring.read).store(at + nbytes, std::memory_order_release);
    return nbytes;
}

inline void run(const Communicator& comm, Job& job) {
    for (;;) {
        if (comm.aborted) {
            return;
        }
        bool over = !job.is_lost;
        size_t moved = 0;
        bool busy[2][MOST_RANKS] = {};
        for (Transfer& transfer : job.transfers) {
            if (transfer.left == 0 || busy[transfer.sends][transfer.peer]) {
                over = over && transfer.left == 0;
                continue;
            }
            moved += advance(comm, transfer);
            busy[transfer.sends][transfer.peer] = transfer.left > 0;
            over = over && transfer.left == 0;
        }
        if (over) {
            break;
        }
        if (moved == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }
    for (const auto& each : job.finish) {
        each();
    }
}

}  // namespace stub
