// The store's server and client over socket pairs, and what hostile clients may try.
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "check.hpp"
#include "store/client.hpp"
#include "store/server.hpp"

namespace {

using namespace paceline::store;

int connect_to(Server& server) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    server.adopt(pair[0]);
    return pair[1];
}

Message ask(Client& client, Op op, std::int64_t number, std::vector<std::string> fields) {
    Message answer;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const auto result =
        client.ask({static_cast<std::uint8_t>(op), number, std::move(fields)}, answer, deadline, [] { return false; });
    CHECK(result == Client::Result::answered);
    return answer;
}

void clients_share_what_they_set() {
    Server server;
    Client one(connect_to(server)), two(connect_to(server));
    ask(one, Op::set, 0, {"key", std::string(300'000, 'x')});
    CHECK(ask(two, Op::get, 0, {"key"}).fields[0].size() == 300'000);
    for (int i = 0; i < 100; ++i) ask(i % 2 ? one : two, Op::add, 1, {"n"});
    CHECK(ask(one, Op::add, 0, {"n"}).number == 100);
}

void a_waiting_client_is_woken_and_a_late_key_is_named() {
    Server server;
    Client waits(connect_to(server)), sets(connect_to(server));
    std::thread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        ask(sets, Op::set, 0, {"key", "value"});
    });
    CHECK(ask(waits, Op::get, 10'000, {"key"}).fields[0] == "value");
    later.join();
    const Message late = ask(waits, Op::wait, 50, {"key", "never"});
    CHECK(late.code == static_cast<std::uint8_t>(Status::timed_out));
    CHECK(late.fields.size() == 1 && late.fields[0] == "never");
}

void garbage_ends_its_own_connection_only() {
    Server server;
    Client good(connect_to(server));
    const unsigned char huge[] = {0xff, 0xff, 0xff, 0xff, 1, 2, 3};
    const unsigned char inner[] = {17, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f};
    for (const auto& bytes : {std::string(reinterpret_cast<const char*>(huge), sizeof huge),
                              std::string(reinterpret_cast<const char*>(inner), sizeof inner)}) {
        const int fd = connect_to(server);
        CHECK(write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
        char byte = 0;
        CHECK(read(fd, &byte, 1) == 0);  // closed by the server
        close(fd);
    }
    const int half_open = connect_to(server);
    CHECK(write(half_open, "\x20\0\0", 3) == 3);
    ask(good, Op::set, 0, {"still", "here"});
    CHECK(ask(good, Op::get, 0, {"still"}).fields[0] == "here");
    CHECK(ask(good, Op::add, 1, {"still"}).code == static_cast<std::uint8_t>(Status::refused));
    close(half_open);
}

}  // namespace

int main() {
    clients_share_what_they_set();
    a_waiting_client_is_woken_and_a_late_key_is_named();
    garbage_ends_its_own_connection_only();
}
