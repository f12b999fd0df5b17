// Tests that bytes, round trips and overdue responses of plain and encrypted connections are measured and recorded.
#include "link/link_meter.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "encrypted.hpp"
#include "link/encrypted_lane.hpp"
#include "record/snapshot.hpp"

namespace {

using namespace paceline;
using namespace paceline::link;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kNbytes = 1 << 20;

// The two ends of a TCP connection over loopback.
std::pair<int, int> connected() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const at = reinterpret_cast<sockaddr*>(&address);
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(listener, at, size) == 0 && listen(listener, 1) == 0 && getsockname(listener, at, &size) == 0);
    const int a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(connect(a, at, size) == 0 && fcntl(a, F_SETFL, O_NONBLOCK) == 0);
    const int b = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    CHECK(b >= 0);
    close(listener);
    return {a, b};
}

// Returns true if TCP_INFO is complete; qemu-user returns only its first four bytes.
bool the_kernel_tells_all() {
    const auto [a, b] = connected();
    std::array<std::uint8_t, 256> tcp_info_bytes;
    socklen_t size = tcp_info_bytes.size();
    CHECK(getsockopt(a, IPPROTO_TCP, TCP_INFO, tcp_info_bytes.data(), &size) == 0);
    for (const int each : {a, b}) close(each);
    return size > sizeof(int);
}

// Waits until `has_come` returns true, for at most ten seconds.
void wait_until(const std::function<bool()>& has_come) {
    const auto until = Clock::now() + std::chrono::seconds(10);
    while (!has_come() && Clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(has_come());
}

// Transfers bytes from one lane to the other.
void move(Lane& from, Lane& to, std::size_t nbytes) {
    std::vector<std::uint8_t> sent(nbytes, 7), received(nbytes);
    std::size_t handle = 0, read = 0;
    wait_until([&] {
        const ByteRange rest{sent.data() + handle, nbytes - handle};
        if (rest.nbytes != 0) handle += static_cast<std::size_t>(from.write({&rest, 1}));
        const ByteRange missing{received.data() + read, nbytes - read};
        read += static_cast<std::size_t>(to.read({&missing, 1}));
        return read == nbytes;
    });
    CHECK(received == sent);
}

record::LinkFields measured(int socket) {
    record::LinkFields fields;
    CHECK(add_connection(socket, fields));
    return fields;
}

void what_a_connection_carried_is_counted(bool is_encrypted) {
    const auto [first, second] = connected();
    tls::Socket a(first), b(second);
    if (is_encrypted) {
        const auto identity = encrypted::identity_of(1);
        encrypted::handshake(a, b, identity);
    }
    const record::LinkFields before = measured(first);
    const std::unique_ptr<Lane> from = make_lane(std::move(a)), to = make_lane(std::move(b));
    move(*from, *to, kNbytes);
    wait_until([&, first = first] { return measured(first).sent_nbytes - before.sent_nbytes >= kNbytes; });
    const record::LinkFields after = measured(first);
    CHECK(after.connections == 1 && after.segments > before.segments && after.silent_ms == 0);
    CHECK(after.round_trip_us > 0 && after.busy_us >= before.busy_us);
    CHECK(measured(second).received_nbytes >= kNbytes);
}

void a_link_sums_up_its_connections() {
    const auto [a, b] = connected();
    const auto [c, d] = connected();
    CHECK(send(a, "four", 4, 0) == 4 && send(c, "four", 4, 0) == 4);
    record::LinkFields fields;
    wait_until([&, a = a, c = c] {
        fields = {};
        return add_connection(a, fields) && add_connection(c, fields) && fields.sent_nbytes >= 8;
    });
    CHECK(fields.connections == 2 && fields.segments == 2);
    for (const int each : {a, b, c, d}) close(each);
}

void a_unix_socket_is_no_link() {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    record::LinkFields fields;
    CHECK(!add_connection(ends[0], fields) && fields.connections == 0);
    for (const int each : ends) close(each);
}

struct Entry {
    std::uint64_t stamp;
    record::LinkFields fields;
};

std::vector<Entry> recorded(int memory) {
    const std::vector<std::uint8_t> copied = record::snapshot(memory);
    record::Header header;
    std::memcpy(static_cast<void*>(&header), copied.data(), sizeof header);
    std::vector<Entry> entries(header.links_used.load());
    std::memcpy(entries.data(), copied.data() + header.links.offset, entries.size() * sizeof(Entry));
    return entries;
}

void a_meter_writes_once_a_second_and_at_the_end() {
    const int memory = memfd_create("paceline-link-test", MFD_CLOEXEC);
    CHECK(ftruncate(memory, static_cast<off_t>(record::kBytes)) == 0);
    CHECK(record::Recorder::begin(memory, {}));
    const auto [a, b] = connected();
    LinkMeter meter;
    meter.watch(3, {a});
    meter.record_as(5);
    const auto now = Clock::now();
    meter.measure_if_due(now);
    CHECK(recorded(memory).size() == 1 && recorded(memory)[0].fields.sent_nbytes < 4);  // the kernel counts the SYN
    CHECK(send(a, "four", 4, 0) == 4);
    wait_until([a = a] { return measured(a).sent_nbytes >= 4; });
    meter.measure_if_due(now + std::chrono::milliseconds(900));
    CHECK(recorded(memory)[0].fields.sent_nbytes < 4);
    meter.measure_if_due(now + std::chrono::milliseconds(1100));
    CHECK(recorded(memory)[0].fields.sent_nbytes >= 4);
    CHECK(recorded(memory)[0].fields.peer == 3 && recorded(memory)[0].fields.group == 5);
    CHECK((recorded(memory)[0].stamp & record::kStateMask) == record::kOpen);
    CHECK(send(a, "four", 4, 0) == 4);
    wait_until([a = a] { return measured(a).sent_nbytes >= 8; });
    meter.close();
    const std::vector<Entry> last = recorded(memory);
    CHECK(last.size() == 1 && last[0].fields.sent_nbytes >= 8 && (last[0].stamp & record::kStateMask) == 0);
    for (const int each : {a, b, memory}) close(each);
}

}  // namespace

int main() {
    if (!the_kernel_tells_all()) {
        std::puts("skipped: an emulator stands between this test and the kernel");
        return 0;
    }
    what_a_connection_carried_is_counted(false);
    if (!encrypted::unavailable()) what_a_connection_carried_is_counted(true);
    a_link_sums_up_its_connections();
    a_unix_socket_is_no_link();
    a_meter_writes_once_a_second_and_at_the_end();
    return 0;
}
