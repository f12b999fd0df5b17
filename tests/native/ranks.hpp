// Ranks for tests, as threads of one process. They are connected by plain or encrypted sockets, like ranks on different
// hosts, or by rings, like ranks on one host.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "call/call_queue.hpp"
#include "check.hpp"
#include "encrypted.hpp"
#include "executor/executor.hpp"

namespace ranks {

using namespace paceline;
using namespace paceline::executor;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kSecond = 1000 * kMs;
// Limits that a test reaches only if it hangs, even if a sanitizer and other processes slow it down.
constexpr std::int64_t kHung = 60 * kSecond;
constexpr double kSoonS = 20;  // limit for operations that would otherwise end at `kHung`

enum class Over { sockets, tcp, rings };

// True if the socket pairs are encrypted; see `plain_and_encrypted`.
inline bool encrypts = false;

// Returns the kinds of connection over which tests of all kinds of lane run. Rings are never encrypted, so the
// encrypted pass omits them.
inline std::vector<Over> kinds() {
    return encrypts ? std::vector{Over::sockets} : std::vector{Over::sockets, Over::rings};
}

// Runs the tests over plain sockets, and again over encrypted ones.
inline void plain_and_encrypted(const std::function<void()>& tests) {
    tests();
    encrypts = !encrypted::unavailable();
    if (encrypts) tests();
}

struct Rank {
    int rank;
    int size;
    link::LaneSet& lanes;
    Messenger& messenger;
    Executor& executor;
    std::shared_ptr<shm::HostMesh> mesh;
};

inline std::pair<int, int> joined() {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    return {ends[0], ends[1]};
}

// Returns the two ends of a TCP connection on loopback. The second end has a small receive buffer.
inline std::pair<int, int> joined_by_tcp() {
    constexpr int kRoom = 8 << 10;
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int first = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* name = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof address;
    CHECK(setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &kRoom, sizeof kRoom) == 0);
    CHECK(bind(listener, name, size) == 0 && listen(listener, 1) == 0 && getsockname(listener, name, &size) == 0);
    CHECK(connect(first, name, size) == 0);
    const int second = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    CHECK(second >= 0);
    ::close(listener);
    return {first, second};
}

// Calls `body` for each of n ranks. When `body` returns, the rank's group and mesh are closed, as if the rank had left.
inline void with_ranks(int n, int streams, Over over, const std::function<void(Rank)>& body) {
    const auto size = static_cast<std::size_t>(n);
    std::vector<std::vector<std::vector<tls::Socket>>> sockets(size);
    for (auto& row : sockets) row.resize(size);
    for (std::size_t i = 0; i < size; ++i)
        for (std::size_t j = i + 1; j < size && over != Over::rings; ++j)
            for (int lane = 0; lane < 1 + streams; ++lane) {
                auto [a, b] = over == Over::tcp ? std::pair<tls::Socket, tls::Socket>(joined_by_tcp())
                              : encrypts        ? encrypted::joined()
                                                : std::pair<tls::Socket, tls::Socket>(joined());
                sockets[i][j].push_back(std::move(a));
                sockets[j][i].push_back(std::move(b));
            }
    const auto directory = shm::HostDirectory::create(n);
    CHECK(directory != nullptr);
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < size; ++r)
        threads.emplace_back([&, r] {
            const auto mesh = std::make_shared<shm::HostMesh>(static_cast<int>(r), directory);
            std::vector<int> places;
            for (std::size_t p = 0; p < size; ++p)
                places.push_back(over == Over::rings || p == r ? static_cast<int>(p) : -1);
            {
                const auto lanes = link::LaneSet::create(mesh, 1, static_cast<int>(r), places, std::move(sockets[r]),
                                                         Clock::now() + std::chrono::nanoseconds(kHung));
                CHECK(lanes != nullptr);
                Messenger messenger(*lanes);
                Executor executor(*lanes, messenger);
                body({static_cast<int>(r), n, *lanes, messenger, executor, mesh});
            }
            mesh->close();
        });
    for (std::thread& thread : threads) thread.join();
}

template <class T>
ByteStream stream_of(std::vector<T>& values) {
    return ByteStream({{reinterpret_cast<std::uint8_t*>(values.data()), values.size() * sizeof(T)}});
}

inline double seconds_since(Clock::time_point then) {
    return std::chrono::duration<double>(Clock::now() - then).count();
}

inline void pause(int ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

// Returns an `Interrupted` that never interrupts. It sets `waits` once its rank has waited for a few poll intervals and
// has therefore announced its call.
inline Interrupted records_that_it_waits(std::atomic<bool>& waits) {
    return [&waits] {
        waits = true;
        return false;
    };
}

}  // namespace ranks
