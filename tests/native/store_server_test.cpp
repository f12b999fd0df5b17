// Tests the store's table, its parked requests, and its server with well-behaved, slow and hostile clients.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "check.hpp"
#include "encrypted.hpp"
#include "store/client.hpp"
#include "store/server.hpp"

namespace {

using namespace paceline::store;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

Message request(Op op, std::vector<std::string> fields, std::int64_t number = 0) {
    return {static_cast<std::uint8_t>(op), number, std::move(fields)};
}

bool never() {
    return false;
}

// Connects to `server` and returns the caller's end.
int connect_to(Server& server) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    server.adopt(ends[0]);
    return ends[1];
}

bool encrypts = false;

// Like `connect_to`, but for Paceline's own clients, whose connections may be encrypted.
paceline::tls::Socket client_of(Server& server) {
    if (!encrypts) return connect_to(server);
    auto [theirs, mine] = encrypted::joined();
    server.adopt(std::move(theirs));
    return std::move(mine);
}

Message call(Client& client, const Message& what) {
    Message answer;
    CHECK(client.call(what, answer, Clock::now() + 60s, never) == Client::Result::answered);
    return answer;
}

bool closed_by_peer(int fd) {
    pollfd watched{fd, POLLIN, 0};
    char byte;
    return poll(&watched, 1, 60'000) == 1 && recv(fd, &byte, 1, 0) <= 0;
}

void send_raw(int fd, const std::string& bytes) {
    for (std::size_t sent = 0; sent < bytes.size();) {
        const ssize_t n = send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
        if (n <= 0) return;
        sent += static_cast<std::size_t>(n);
    }
}

std::string encoded(const Message& message) {
    std::string bytes;
    encode(message, bytes);
    return bytes;
}

void a_parked_request_is_answered_when_its_last_key_is_set() {
    Table table;
    ParkedRequests waiters;
    std::vector<std::string> changed;
    const auto later = Clock::now() + 1h;
    waiters.park(7, request(Op::multi_get, {"a", "b", "c"}, 1000), later, table);
    for (const char* key : {"b", "a"}) {
        CHECK(table.apply(request(Op::set, {key, key}), changed));
        CHECK(waiters.wake(table, changed).empty());
    }
    CHECK(table.apply(request(Op::remove, {"a"}), changed));  // the key must be set again
    CHECK(table.apply(request(Op::set, {"c", "c"}), changed));
    CHECK(waiters.wake(table, changed).empty());
    CHECK(table.apply(request(Op::set, {"a", "again"}), changed));
    const auto answers = waiters.wake(table, changed);
    CHECK(answers.size() == 1 && answers[0].first == 7);
    CHECK((answers[0].second.fields == std::vector<std::string>{"again", "b", "c"}));
    CHECK(!waiters.holds(7) && !waiters.next_deadline());
}

void queued_values_are_popped_in_the_order_of_requests() {
    Table table;
    ParkedRequests waiters;
    std::vector<std::string> changed;
    const auto later = Clock::now() + 1h;
    for (int id : {3, 1, 2}) waiters.park(id, request(Op::queue_pop, {"q"}, 1000), later, table);
    waiters.remove(1);
    CHECK(table.apply(request(Op::queue_push, {"q", "first"}), changed));
    auto answers = waiters.wake(table, changed);
    CHECK(answers.size() == 1 && answers[0].first == 3 && answers[0].second.fields[0] == "first");
    CHECK(table.apply(request(Op::queue_push, {"q", "second"}), changed));
    answers = waiters.wake(table, changed);
    CHECK(answers.size() == 1 && answers[0].first == 2 && answers[0].second.fields[0] == "second");
}

void a_request_that_times_out_lists_the_missing_key() {
    Table table;
    ParkedRequests waiters;
    std::vector<std::string> changed;
    const auto now = Clock::now();
    CHECK(table.apply(request(Op::set, {"here", ""}), changed));
    waiters.park(1, request(Op::wait, {"here", "gone"}, 5), now + 5ms, table);
    waiters.park(2, request(Op::wait, {"gone"}, 500), now + 500ms, table);
    CHECK(*waiters.next_deadline() == now + 5ms);
    CHECK(waiters.expire(now + 4ms, table).empty());
    const auto answers = waiters.expire(now + 5ms, table);
    CHECK(answers.size() == 1 && answers[0].first == 1);
    CHECK(answers[0].second.code == static_cast<std::uint8_t>(Status::timed_out));
    CHECK((answers[0].second.fields == std::vector<std::string>{"gone"}));
    CHECK(waiters.holds(2));
}

void a_get_waits_for_a_value_although_a_queue_has_the_name() {
    Table table;
    ParkedRequests waiters;
    std::vector<std::string> changed;
    CHECK(table.apply(request(Op::queue_push, {"k", "queued"}), changed));
    CHECK(!table.apply(request(Op::get, {"k"}, 1000), changed));
    waiters.park(1, request(Op::get, {"k"}, 1000), Clock::now() + 1h, table);
    CHECK(waiters.wake(table, changed).empty());
    CHECK(table.apply(request(Op::set, {"k", "value"}), changed));
    const auto answers = waiters.wake(table, changed);
    CHECK(answers.size() == 1 && answers[0].second.fields[0] == "value");
}

void malformed_messages_are_recognized() {
    Message message;
    std::size_t used = 0;
    std::string good = encoded(request(Op::set, {"key", "value"}, -5));
    CHECK(decode(good, message, used) == ParseResult::complete && used == good.size() && message.number == -5);
    for (std::size_t n = 0; n < good.size(); ++n)
        CHECK(decode(std::string_view(good).substr(0, n), message, used) == ParseResult::partial);
    std::string huge = good;
    huge[3] = '\x7f';  // the message announces 2 GB
    CHECK(decode(huge, message, used) == ParseResult::malformed);
    std::string many = good;
    many[4 + 1 + 8 + 3] = '\x7f';  // the message announces two billion fields
    CHECK(decode(many, message, used) == ParseResult::malformed);
    std::string longer = good;
    longer[4 + 1 + 8 + 4] = '\x40';  // the message announces a field that is longer than the message
    CHECK(decode(longer, message, used) == ParseResult::malformed);
    CHECK(decode(std::string(64, '\0'), message, used) == ParseResult::malformed);
}

void hostile_clients_are_dropped_and_the_others_served() {
    Server server;
    Client good(client_of(server));

    const int garbage = connect_to(server);
    send_raw(garbage, std::string(32, '\0'));
    CHECK(closed_by_peer(garbage));

    const int oversized = connect_to(server);
    send_raw(oversized, std::string("\xff\xff\xff\xff", 4) + "x");
    CHECK(closed_by_peer(oversized));

    const int impatient = connect_to(server);  // this client sends more data while its request is waiting
    send_raw(impatient, encoded(request(Op::get, {"never"}, 60'000)) + encoded(request(Op::count, {})));
    CHECK(closed_by_peer(impatient));

    const int half = connect_to(server);  // this client never finishes a request
    send_raw(half, encoded(request(Op::set, {"half", "sent"})).substr(0, 9));

    const int gone = connect_to(server);  // this client disconnects while its request is waiting
    send_raw(gone, encoded(request(Op::get, {"late"}, 60'000)));
    close(gone);

    CHECK(call(good, request(Op::set, {"late", "now"})).code == static_cast<std::uint8_t>(Status::ok));
    CHECK(call(good, request(Op::get, {"late"}, 1000)).fields[0] == "now");
    CHECK(call(good, request(Op::check, {"half"})).number == 0);
    CHECK(call(good, request(static_cast<Op>(99), {"x"})).code == static_cast<std::uint8_t>(Status::refused));
    CHECK(call(good, request(Op::set, {"no value"})).code == static_cast<std::uint8_t>(Status::refused));
    for (int fd : {garbage, oversized, impatient, half}) close(fd);
}

void keys_set_before_garbage_wake_their_waiters() {
    Server server;
    Client waiting(client_of(server));
    std::thread waiter([&] { CHECK(call(waiting, request(Op::get, {"k"}, 20'000)).fields[0] == "v"); });
    std::this_thread::sleep_for(50ms);
    const int odd = connect_to(server);
    send_raw(odd, encoded(request(Op::set, {"k", "v"})) + std::string(32, '\xff'));
    waiter.join();
    close(odd);
}

void a_client_that_does_not_read_delays_no_other_client() {
    Server server;
    Client good(client_of(server));
    call(good, request(Op::set, {"big", std::string(8 << 20, 'b')}));
    const int lazy = connect_to(server);
    for (int i = 0; i < 3; ++i) send_raw(lazy, encoded(request(Op::get, {"big"}, 1000)));
    CHECK(call(good, request(Op::add, {"n"}, 4)).number == 4);
    std::size_t got = 0;  // the client receives all answers once it begins to read
    std::vector<char> buffer(1 << 20);
    while (got < 3 * (std::size_t{8} << 20)) {
        const ssize_t n = recv(lazy, buffer.data(), buffer.size(), 0);
        CHECK(n > 0);
        got += static_cast<std::size_t>(n);
    }
    close(lazy);
    CHECK(call(good, request(Op::add, {"n"}, 1)).number == 5);
}

void a_request_may_arrive_byte_by_byte() {
    Server server;
    const int fd = connect_to(server);
    for (const char byte : encoded(request(Op::set, {"slow", "loris"}))) {
        send_raw(fd, std::string(1, byte));
        std::this_thread::sleep_for(1ms);
    }
    char answer[64];
    CHECK(recv(fd, answer, sizeof answer, 0) > 0);
    Client other(client_of(server));
    CHECK(call(other, request(Op::get, {"slow"}, 1000)).fields[0] == "loris");
    close(fd);
}

void many_clients_add_to_one_sum() {
    Server server;
    std::vector<std::thread> threads;
    for (int i = 0; i < 16; ++i)
        threads.emplace_back([&server] {
            Client client(client_of(server));
            for (int n = 0; n < 200; ++n) call(client, request(Op::add, {"sum"}, 1));
            call(client, request(Op::add, {"done"}, 1));
        });
    for (std::thread& thread : threads) thread.join();
    Client client(client_of(server));
    CHECK(call(client, request(Op::get, {"sum"}, 1000)).fields[0] == "3200");
}

void large_values_are_returned_whole() {
    Server server;
    Client client(client_of(server));
    std::string value(32 << 20, '\0');
    for (std::size_t i = 0; i < value.size(); i += 4093) value[i] = static_cast<char>(i);
    call(client, request(Op::set, {"large", value}));
    CHECK(call(client, request(Op::get, {"large"}, 1000)).fields[0] == value);
}

void closing_the_client_wakes_its_waiting_threads() {
    Server server;
    Client client(client_of(server));
    std::thread closer([&] {
        std::this_thread::sleep_for(50ms);
        client.close();
    });
    Message answer;
    CHECK(client.call(request(Op::get, {"never"}, 60'000), answer, Clock::now() + 60s, never) ==
          Client::Result::closed);
    closer.join();
    CHECK(client.call(request(Op::count, {}), answer, Clock::now() + 1s, never) == Client::Result::closed);
}

void closing_the_server_wakes_its_clients() {
    Server server;
    Client client(client_of(server));
    std::thread closer([&] {
        std::this_thread::sleep_for(50ms);
        server.close();
        server.close();
    });
    Message answer;
    CHECK(client.call(request(Op::get, {"never"}, 60'000), answer, Clock::now() + 60s, never) ==
          Client::Result::closed);
    closer.join();
    Client late(client_of(server));
    CHECK(late.call(request(Op::count, {}), answer, Clock::now() + 60s, never) == Client::Result::closed);
}

void the_server_publishes_the_will_of_a_lost_connection() {
    Server server;
    Client heir(client_of(server));
    for (const bool taken_back : {true, false}) {
        Client testator(client_of(server));
        CHECK(call(testator, request(Op::last_will, {"will", "an earlier one"})).code == 0);
        CHECK(call(testator, request(Op::last_will, {"will", "the last"}, taken_back ? 1 : 0)).code == 0);
        CHECK(call(heir, request(Op::check, {"will"})).number == 0);
        testator.close();
        const Message answer = call(heir, request(Op::get, {"will"}, taken_back ? 50 : 20'000));
        CHECK(taken_back ? answer.code == static_cast<std::uint8_t>(Status::timed_out)
                         : answer.fields == std::vector<std::string>{"the last"});
    }
}

void a_connection_may_leave_a_will_for_each_key() {
    Server server;
    Client heir(client_of(server));
    Client testator(client_of(server));
    for (const char* key : {"one", "two", "three"})
        CHECK(call(testator, request(Op::last_will, {key, std::string("of ") + key})).code == 0);
    CHECK(call(testator, request(Op::last_will, {"two", ""}, 1)).code == 0);
    testator.close();
    CHECK((call(heir, request(Op::multi_get, {"one", "three"}, 20'000)).fields ==
           std::vector<std::string>{"of one", "of three"}));
    CHECK(call(heir, request(Op::check, {"two"})).number == 0);
}

void a_server_that_died_is_distinguished_from_one_closed() {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    Client client(ends[0]);
    close(ends[1]);
    Message answer;
    CHECK(client.call(request(Op::count, {}), answer, Clock::now() + 60s, never) == Client::Result::lost);

    // The goodbye may also arrive between two requests.
    Server server;
    Client idle(client_of(server));
    CHECK(call(idle, request(Op::count, {})).number == 0);
    server.close();
    CHECK(idle.call(request(Op::count, {}), answer, Clock::now() + 60s, never) == Client::Result::closed);
}

void a_request_to_a_silent_server_ends_at_its_deadline() {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    Client client(ends[0]);
    Message answer;
    CHECK(client.call(request(Op::count, {}), answer, Clock::now() + 50ms, never) == Client::Result::timed_out);
    close(ends[1]);
}

template <class T>
std::string raw(T value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string torch_text(const std::string& text) {
    return raw(std::uint64_t{text.size()}) + text;
}

void torch_queries_are_read_whichever_parts_they_come_in() {
    std::string query = "\x0b";
    for (const std::string& part : {raw(std::uint64_t{2}), torch_text("a"), torch_text("one"), torch_text("b")}) {
        query += part;
    }
    query += torch_text(std::string(1000, '2'));
    for (std::size_t first = 0; first < query.size(); first += 7) {
        TorchReader reader;
        std::size_t used = 0;
        CHECK(reader.read(std::string_view(query).substr(0, first), used) == ParseResult::partial);
        CHECK(reader.read(query + "\x07", used) == ParseResult::complete && used == query.size());
        CHECK(reader.query() == TorchQuery::multi_set);
        CHECK((reader.request().fields == std::vector<std::string>{"a", "one", "b", std::string(1000, '2')}));
        CHECK(reader.read(std::string("\x07"), used) == ParseResult::complete && used == 1);
        CHECK(reader.query() == TorchQuery::count && reader.request().fields.empty());
    }
}

void the_reader_of_torch_queries_handles_random_bytes() {
    std::uint32_t state = 1;
    const auto next = [&state] { return state = state * 1664525u + 1013904223u, state >> 24; };
    for (int round = 0; round < 20'000; ++round) {
        std::string bytes;
        const std::uint32_t length = next();
        for (std::uint32_t i = 0; i < length; ++i) bytes += static_cast<char>(next() < 160 ? next() % 3 : next());
        if (!bytes.empty()) bytes[0] = static_cast<char>(next() % 20);
        TorchReader reader;
        std::size_t used = 0;
        std::size_t end = 0;
        ParseResult parsed = ParseResult::partial;
        while (parsed == ParseResult::partial && end < bytes.size()) {
            end = std::min(bytes.size(), end + 1 + next() % 16);
            parsed = reader.read(std::string_view(bytes).substr(0, end), used);
        }
        CHECK(parsed != ParseResult::complete || used <= end);
    }
}

void a_table_counts_what_it_holds() {
    Table table;
    std::vector<std::string> changed;
    const auto apply = [&](Op op, std::vector<std::string> fields, std::int64_t number = 0) {
        CHECK(table.apply(request(op, std::move(fields), number), changed));
    };
    apply(Op::set, {"k", std::string(1000, 'v')});
    const std::size_t once = table.nbytes();
    CHECK(once >= 1000);
    apply(Op::set, {"k", std::string(10, 'v')});
    CHECK(table.nbytes() == once - 990);
    apply(Op::append, {"k", std::string(990, 'v')});
    CHECK(table.nbytes() == once);
    apply(Op::add, {"n"}, 5);
    apply(Op::compare_set, {"c", "", "value"});
    apply(Op::multi_set, {"a", "1", "b", "2"});
    apply(Op::queue_push, {"q", "first"});
    apply(Op::queue_push, {"q", "second"});
    apply(Op::queue_push, {"p", "only"});
    CHECK(table.nbytes() > once);
    apply(Op::queue_pop, {"q"});
    apply(Op::queue_pop, {"p"});
    for (const char* key : {"k", "n", "c", "a", "b", "q", "p", "none"}) apply(Op::remove, {key});
    CHECK(table.nbytes() == 0);
}

void all_of_the_server() {
    hostile_clients_are_dropped_and_the_others_served();
    keys_set_before_garbage_wake_their_waiters();
    a_client_that_does_not_read_delays_no_other_client();
    a_request_may_arrive_byte_by_byte();
    many_clients_add_to_one_sum();
    large_values_are_returned_whole();
    closing_the_client_wakes_its_waiting_threads();
    closing_the_server_wakes_its_clients();
    the_server_publishes_the_will_of_a_lost_connection();
    a_connection_may_leave_a_will_for_each_key();
    a_server_that_died_is_distinguished_from_one_closed();
    a_request_to_a_silent_server_ends_at_its_deadline();
}

}  // namespace

int main() {
    a_parked_request_is_answered_when_its_last_key_is_set();
    queued_values_are_popped_in_the_order_of_requests();
    a_request_that_times_out_lists_the_missing_key();
    a_get_waits_for_a_value_although_a_queue_has_the_name();
    malformed_messages_are_recognized();
    torch_queries_are_read_whichever_parts_they_come_in();
    the_reader_of_torch_queries_handles_random_bytes();
    a_table_counts_what_it_holds();
    all_of_the_server();
    encrypts = !encrypted::unavailable();
    if (encrypts) all_of_the_server();
}
