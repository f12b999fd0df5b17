// Tests the host directory and the host mesh: the detection of exits, doorbells, and shared memory.
#include "shm/host_directory.hpp"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "check.hpp"
#include "link/waiter.hpp"
#include "shm/failure_detector.hpp"
#include "shm/group_segment.hpp"
#include "shm/host_mesh.hpp"

namespace {

using namespace paceline;
using namespace paceline::shm;

constexpr std::chrono::seconds kHung{60};  // a limit that a test reaches only if it hangs

HostMesh::Deadline in_time() {
    return std::chrono::steady_clock::now() + kHung;
}

std::shared_ptr<HostDirectory> directory_of(int ranks) {
    auto directory = HostDirectory::create(ranks);
    CHECK(directory != nullptr);
    return directory;
}

// A thread can represent a rank's process, because the kernel releases the robust futexes of both when they exit.
void exit_with_futexes(const HostDirectory& directory, int rank) {
    RobustFutexes futexes(directory, rank);
    std::thread([&] {
        futexes.acquire();
        directory.arrive(rank);
        while (!directory.absent(kHung).empty()) {
        }
    }).join();
}

void await(const HostDirectory& directory, int rank, RankState state) {
    const auto until = in_time();
    while (directory.entry(rank).state.load() != state) {
        CHECK(std::chrono::steady_clock::now() < until);
        std::this_thread::yield();
    }
}

void the_release_of_futexes_by_the_kernel_is_detected(bool uses_futex_waitv) {
    const auto directory = directory_of(3);
    RegionExchange listens;  // destroyed after `watch`, which would otherwise detect its end
    std::promise<void> notified;
    FailureDetector watch(directory, 0, [&notified] { notified.set_value(); }, uses_futex_waitv);
    directory->entry(2).listener = listens.listener_name();
    directory->arrive(0);
    directory->arrive(2);
    exit_with_futexes(*directory, 1);
    notified.get_future().wait();
    CHECK(directory->entry(1).state == RankState::lost && directory->entry(2).state == RankState::present);
}

// Rank 0 waits only for the futexes of ranks 1 to kMaxWatchers. The exits of other ranks are reported to rank 0 or
// detected by its infrequent checks.
void an_exit_is_detected_by_ranks_that_do_not_wait_on_its_futexes() {
    const int ranks = kMaxWatchers + 10, dead = kMaxWatchers + 5;
    const auto directory = directory_of(ranks);
    RegionExchange listens;
    std::promise<void> notified;
    FailureDetector watch(directory, 0, [&notified] { notified.set_value(); });
    for (int r = 0; r < ranks; ++r) {
        if (r == dead) continue;
        directory->entry(r).listener = listens.listener_name();
        directory->arrive(r);
    }
    exit_with_futexes(*directory, dead);
    notified.get_future().wait();
    CHECK(directory->entry(dead).state == RankState::lost);
}

void a_rank_without_futexes_is_alive_while_it_listens() {
    const auto directory = directory_of(2);
    std::promise<void> notified;
    FailureDetector watch(directory, 0, [&notified] { notified.set_value(); });
    auto exchange = std::make_unique<RegionExchange>();
    directory->entry(1).listener = exchange->listener_name();
    directory->arrive(0);
    directory->arrive(1);
    auto change = notified.get_future();
    CHECK(change.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout);
    exchange.reset();
    change.wait();
    CHECK(directory->entry(1).state == RankState::lost);
}

void a_rank_that_left_is_not_lost() {
    const auto directory = directory_of(2);
    std::atomic<int> changes{0};
    FailureDetector watch(directory, 0, [&changes] { ++changes; });
    directory->arrive(0);
    RobustFutexes futexes(*directory, 1);
    std::thread([&] {
        futexes.acquire();
        directory->arrive(1);
        directory->leave(1);
    }).join();
    const auto until = in_time();
    while (changes == 0) CHECK(std::chrono::steady_clock::now() < until);
    watch.close();
    CHECK(directory->entry(1).state == RankState::left && changes == 1);
}

void a_process_that_is_killed_is_lost_at_once() {
    const auto directory = directory_of(2);
    const pid_t child = fork();
    if (child == 0) {
        HostMesh mesh(1, directory);
        for (;;) pause();
    }
    HostMesh mesh(0, directory);
    CHECK(mesh.directory().absent(kHung).empty());
    CHECK(!mesh.is_gone(1));
    kill(child, SIGKILL);
    await(*directory, 1, RankState::lost);
    CHECK(mesh.has_died(1) && !mesh.has_left(1));
    CHECK(waitpid(child, nullptr, 0) == child);
}

// Calls `body` with the mesh of each of n ranks, each on its own thread.
void with_meshes(int n, const std::function<void(HostMesh&)>& body) {
    const auto directory = directory_of(n);
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r)
        threads.emplace_back([&, r] {
            HostMesh mesh(r, directory);
            CHECK(directory->absent(kHung).empty());
            body(mesh);
            mesh.close();
        });
    for (std::thread& thread : threads) thread.join();
}

void a_region_may_be_requested_before_it_is_offered() {
    std::atomic<int> asked{0};
    std::atomic<int> served{0};
    with_meshes(3, [&](HostMesh& mesh) {
        constexpr RegionId kId = 7;
        if (mesh.rank() != 0) {
            ++asked;
            const FetchResult found = mesh.fetch(0, kId, in_time());
            CHECK(found.segment && found.segment->size() == 5000 && found.segment->fd() < 0);
            CHECK(found.segment->data()[4999] == 42);
            ++served;
            return;
        }
        while (asked < 2) std::this_thread::yield();
        const auto segment = Segment::create(5000);
        segment->data()[4999] = 42;
        mesh.offer(kId, segment);
        while (served < 2) std::this_thread::yield();
        CHECK(mesh.withdraw(kId) == segment);
    });
}

void a_region_is_cached_until_its_owner_withdraws_it() {
    std::promise<void> kept;
    with_meshes(2, [&](HostMesh& mesh) {
        constexpr RegionId kId = 7;
        if (mesh.rank() == 0) {
            mesh.offer(kId, Segment::create(5000));
            kept.get_future().wait();
            mesh.withdraw(kId);
            mesh.offer(kId, Segment::create(6000));
            while (!mesh.is_gone(1)) std::this_thread::yield();
            return;
        }
        const std::shared_ptr<Segment> first = mesh.region(0, kId, in_time()).segment;
        CHECK(mesh.region(0, kId, in_time()).segment == first);
        kept.set_value();
        while (mesh.region(0, kId, in_time()).segment == first) std::this_thread::yield();
        CHECK(mesh.region(0, kId, in_time()).segment->size() == 6000);
    });
}

void a_request_without_the_key_receives_no_region() {
    with_meshes(2, [](HostMesh& mesh) {
        constexpr RegionId kId = 7;
        if (mesh.rank() == 0) {
            mesh.offer(kId, Segment::create(5000));
            while (!mesh.is_gone(1)) std::this_thread::yield();
            return;
        }
        CHECK(mesh.fetch(0, kId, in_time()).segment);
        RegionRequest request{mesh.directory().key(), RegionRequest::Kind::fetch, 1, kId};
        request.key[31] = static_cast<std::uint8_t>(request.key[31] ^ 1);
        const auto soon = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
        const RegionReply received =
            RegionExchange::request_region(mesh.directory().entry(0).listener, request, soon, [] { return false; });
        CHECK(!received.segment && received.failure == ETIMEDOUT);
    });
}

void ranks_do_not_wait_for_a_region_of_a_rank_that_has_left() {
    with_meshes(2, [](HostMesh& mesh) {
        if (mesh.rank() == 0) return;
        const FetchResult found = mesh.fetch(0, 7, in_time());
        CHECK(!found.segment && found.error == 0);
    });
}

void a_rank_without_descriptors_receives_an_error() {
    std::promise<void> asked;
    with_meshes(2, [&](HostMesh& mesh) {
        if (mesh.rank() == 0) {
            asked.get_future().wait();
            return;
        }
        rlimit limit{};
        CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
        const rlimit none{3, limit.rlim_max};  // only stdin, stdout and stderr
        CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
        const FetchResult found = mesh.fetch(0, 7, in_time());
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
        CHECK(!found.segment && found.error == EMFILE);
        asked.set_value();
    });
}

void each_waiter_is_woken_by_repeated_doorbells() {
    with_meshes(2, [](HostMesh& mesh) {
        if (mesh.rank() == 0) {
            while (!mesh.is_gone(1)) mesh.wake_peer(1);
            return;
        }
        link::Waiter first, second;
        first.watch_doorbell(mesh.doorbell());
        second.watch_doorbell(mesh.doorbell());
        const auto started = std::chrono::steady_clock::now();
        for (int round = 0; round < 100; ++round) {
            first.sleep(kHung);
            second.sleep(kHung);
        }
        CHECK(std::chrono::steady_clock::now() - started < kHung);
    });
}

void members_share_memory_that_the_first_one_creates() {
    with_meshes(5, [](HostMesh& mesh) {
        if (mesh.rank() == 2) return;
        const auto shared = GroupSegment::open(mesh, {3, 0, 1, 4}, 9, 5 * sizeof(int), in_time());
        CHECK(shared);
        auto* const numbers = reinterpret_cast<int*>(shared->data());
        numbers[mesh.rank()] = 10 + mesh.rank();
        CHECK(shared->wait_for_all(in_time()));
        for (const int r : {0, 1, 3, 4}) CHECK(numbers[r] == 10 + r);
    });
}

void members_do_not_wait_for_a_member_that_has_left() {
    with_meshes(3, [](HostMesh& mesh) {
        if (mesh.rank() == 1) return;
        const auto shared = GroupSegment::open(mesh, {0, 1, 2}, 9, 64, in_time());
        CHECK(shared || mesh.rank() == 2);  // rank 0, which created the memory, may have failed and left already
        CHECK(!shared || !shared->wait_for_all(in_time()));
    });
}

// A rank that requests shared memory must not wait for it if the owner has already canceled it.
void a_canceled_region_is_not_waited_for() {
    std::promise<void> is_canceled;
    const auto started = std::chrono::steady_clock::now();
    with_meshes(2, [&](HostMesh& mesh) {
        if (mesh.rank() == 0) {
            const auto shared = GroupSegment::open(mesh, {0, 1}, 9, 64, in_time());
            CHECK(shared && !shared->wait_for_all(std::chrono::steady_clock::now()));
        }
        if (mesh.rank() == 0) {
            is_canceled.set_value();
            while (!mesh.is_gone(1)) std::this_thread::yield();
            return;
        }
        is_canceled.get_future().wait();
        CHECK(!GroupSegment::open(mesh, {0, 1}, 9, 64, in_time()));
    });
    CHECK(std::chrono::steady_clock::now() - started < kHung);
}

void members_do_not_wait_for_a_member_that_has_failed() {
    const auto started = std::chrono::steady_clock::now();
    with_meshes(3, [](HostMesh& mesh) {
        if (mesh.rank() == 1) {  // this rank makes no request and stays until the others have left
            while (!mesh.is_gone(0) || !mesh.is_gone(2)) std::this_thread::yield();
            return;
        }
        const auto until = mesh.rank() == 2 ? std::chrono::steady_clock::now() : in_time();
        const auto shared = GroupSegment::open(mesh, {0, 1, 2}, 9, 64, in_time());
        CHECK(shared && !shared->wait_for_all(until));
    });
    CHECK(std::chrono::steady_clock::now() - started < kHung);
}

void a_set_of_ranks_holds_all_ranks_of_a_host() {
    RankSet set = RankSet::of(kMaxRanks - 1);
    set.add(64);
    CHECK(set.first() == 64 && set.has(kMaxRanks - 1) && !set.has(0));
    CHECK((set.ranks() == std::vector{64, kMaxRanks - 1}));
    CHECK((set & RankSet::of(63)).empty() && (RankSet::of(3) | set).first() == 3);
    CHECK(RankSet{}.empty() && RankSet{}.first() == -1);
}

}  // namespace

int main() {
    a_set_of_ranks_holds_all_ranks_of_a_host();
    the_release_of_futexes_by_the_kernel_is_detected(false);
    if (FailureDetector::is_supported()) the_release_of_futexes_by_the_kernel_is_detected(true);
    an_exit_is_detected_by_ranks_that_do_not_wait_on_its_futexes();
    a_rank_without_futexes_is_alive_while_it_listens();
    a_rank_that_left_is_not_lost();
    a_process_that_is_killed_is_lost_at_once();
    a_region_may_be_requested_before_it_is_offered();
    a_region_is_cached_until_its_owner_withdraws_it();
    a_request_without_the_key_receives_no_region();
    ranks_do_not_wait_for_a_region_of_a_rank_that_has_left();
    a_rank_without_descriptors_receives_an_error();
    each_waiter_is_woken_by_repeated_doorbells();
    members_share_memory_that_the_first_one_creates();
    members_do_not_wait_for_a_member_that_has_left();
    a_canceled_region_is_not_waited_for();
    members_do_not_wait_for_a_member_that_has_failed();
}
