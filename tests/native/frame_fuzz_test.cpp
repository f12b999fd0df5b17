// Tests that arbitrary bytes from a corrupt peer cause a prompt and orderly failure, without large allocations.
//
//     frame_fuzz_test [rounds] [seed]    mutates the streams in corpus/frames
//     frame_fuzz_test --write            rewrites these files
#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>
#include <string>

#include "ranks.hpp"

namespace {

std::atomic<std::size_t> largest{0};

}  // namespace

void* operator new(std::size_t nbytes) {
    std::size_t most = largest.load(std::memory_order_relaxed);
    while (nbytes > most && !largest.compare_exchange_weak(most, nbytes, std::memory_order_relaxed)) {
    }
    void* const memory = std::malloc(nbytes != 0 ? nbytes : 1);
    if (memory == nullptr) std::abort();
    return memory;
}
void operator delete(void* memory) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

namespace {

using namespace ranks;

using Bytes = std::vector<std::uint8_t>;

constexpr std::size_t kMaxAllocated = 4 << 20;
constexpr std::size_t kLarge = 100'000;
constexpr std::size_t kTensor = 1000;  // floats

const std::string kDirectory = PACELINE_CORPUS "/frames";

class RandomNumbers {
  public:
    explicit RandomNumbers(std::uint64_t seed) : state_(seed * 2 + 1) {}
    std::uint64_t next() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_;
    }
    std::size_t below(std::size_t n) { return n == 0 ? 0 : static_cast<std::size_t>(next() % n); }

  private:
    std::uint64_t state_;
};

void put(Bytes& into, const void* from, std::size_t nbytes) {
    const auto* bytes = static_cast<const std::uint8_t*>(from);
    into.insert(into.end(), bytes, bytes + nbytes);
}

void put(Bytes& into, const Frame& frame, const Bytes& body = {}) {
    put(into, &frame, sizeof frame);
    put(into, body.data(), body.size());
}

CallHeader broadcast_header() {
    CallHeader header{};
    header.sequence = 1;
    header.count = kTensor;
    header.root = 1;
    header.operation = Operation::broadcast;
    header.dtype = DType::f32;
    header.reduce_op = ReduceOp::none;
    header.algorithm = 1;
    return header;
}

Bytes failure(OutcomeCode code) {
    Outcome outcome;
    outcome.code = code;
    outcome.reporter = 1;
    outcome.missing = {0};
    outcome.gone = {0};
    outcome.waiting = {0};
    outcome.blocked_by = {7};
    outcome.calls = {broadcast_header(), broadcast_header()};
    return encode(outcome);
}

// Writes the streams that a correct peer would send to rank 0 in `one_round`: those named "control-" on the control
// lane, and those named "bulk-" on the bulk lane.
void write_corpus() {
    const auto write = [](const std::string& name, const Bytes& bytes) {
        std::ofstream file(kDirectory + "/" + name + ".bin", std::ios::binary);
        file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    };
    Bytes eager;
    for (std::uint64_t id = 1; id <= 3; ++id)
        put(eager, {.kind = FrameKind::eager, .id = id, .nbytes = 100, .tag = static_cast<std::int32_t>(id % 2)},
            Bytes(100, 7));
    write("control-eager", eager);
    Bytes large;
    put(large, {.kind = FrameKind::offer, .id = 1, .nbytes = kLarge, .tag = 1});
    for (std::size_t at = 0; at < kLarge; at += kLarge / 4)
        put(large, {.kind = FrameKind::data, .id = 1, .nbytes = kLarge, .offset = at, .part = kLarge / 4},
            Bytes(kLarge / 4, 9));
    write("control-large", large);
    Bytes answers;
    put(answers, {.kind = FrameKind::accept, .id = 2, .nbytes = kLarge});
    put(answers, {.kind = FrameKind::credit, .nbytes = 148});
    put(answers, {.kind = FrameKind::refuse, .id = 3, .nbytes = kLarge, .offset = 5, .dtype = DType::f64});
    write("control-answers", answers);
    Bytes query;
    const Bytes awaited = encode(Answer{Answer::Kind::waiting, {{0, 0, {1, 1}}, {5, 0, {2, 0}}}});
    put(query, {.kind = FrameKind::query, .id = 1, .offset = 1});
    put(query, {.kind = FrameKind::answer, .id = 1, .nbytes = awaited.size(), .offset = 1}, awaited);
    write("control-query", query);
    Bytes news;
    const CallHeader header = broadcast_header();
    Bytes body;
    put(body, &header, sizeof header);
    put(news, {.kind = FrameKind::waiting, .nbytes = body.size()}, body);
    put(news, {.kind = FrameKind::goodbye});
    write("control-goodbye", news);
    for (const OutcomeCode code :
         {OutcomeCode::mismatch, OutcomeCode::timed_out, OutcomeCode::peer_lost, OutcomeCode::interrupted}) {
        Bytes bytes;
        put(bytes, {.kind = FrameKind::failure, .nbytes = failure(code).size()}, failure(code));
        write("control-failure-" + std::to_string(static_cast<int>(code)), bytes);
    }
    struct {
        std::uint32_t magic = 0x504c4332, step = 0;
        std::uint64_t nbytes = kTensor * sizeof(float);
        CallHeader call = broadcast_header();
    } of_call;
    Bytes bulk;
    put(bulk, &of_call, sizeof of_call);
    bulk.resize(bulk.size() + kTensor * sizeof(float), 1);
    write("bulk-broadcast", bulk);
}

struct CorpusEntry {
    std::string name;
    Bytes bytes;
};

std::vector<CorpusEntry> read_corpus() {
    std::vector<CorpusEntry> streams;
    DIR* const directory = opendir(kDirectory.c_str());
    CHECK(directory != nullptr);
    while (const dirent* entry = readdir(directory)) {
        const std::string name = entry->d_name;
        if (name.size() < 4 || name.substr(name.size() - 4) != ".bin") continue;
        std::ifstream file(kDirectory + "/" + name, std::ios::binary);
        streams.push_back({name, Bytes(std::istreambuf_iterator<char>(file), {})});
    }
    closedir(directory);
    std::sort(streams.begin(), streams.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
    CHECK(streams.size() >= 9);
    return streams;
}

Bytes mutated(const std::vector<CorpusEntry>& corpus, std::size_t which, RandomNumbers& chance) {
    Bytes bytes = corpus[which].bytes;
    for (std::size_t times = chance.below(5); times != 0 && !bytes.empty(); --times) {
        // Mutations are concentrated at the front of each frame, where the header fields are, because most of a stream
        // is payload.
        const std::size_t at =
            chance.below(chance.below(3) == 0 ? bytes.size() : std::min<std::size_t>(200, bytes.size()));
        const std::uint64_t values[] = {0,
                                        1,
                                        2,
                                        0xff,
                                        0x7fffffff,
                                        0x80000000,
                                        0xffffffff,
                                        ~std::uint64_t{0},
                                        std::uint64_t{1} << 63,
                                        chance.next(),
                                        kLarge,
                                        16 << 10,
                                        1 << 20};
        const std::uint64_t value = values[chance.below(std::size(values))];
        switch (chance.below(7)) {
            case 0:
                bytes[at] ^= static_cast<std::uint8_t>(1U << chance.below(8));
                break;
            case 1:
                bytes[at] = static_cast<std::uint8_t>(value);
                break;
            case 2: {
                const std::size_t aligned = at / 8 * 8;
                std::memcpy(bytes.data() + aligned, &value, std::min<std::size_t>(8, bytes.size() - aligned));
                break;
            }
            case 3: {
                const std::size_t aligned = at / 4 * 4;
                std::memcpy(bytes.data() + aligned, &value, std::min<std::size_t>(4, bytes.size() - aligned));
                break;
            }
            case 4:
                bytes.resize(at);
                break;
            case 5: {
                const Bytes& other = corpus[chance.below(corpus.size())].bytes;
                bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), other.begin(), other.end());
                break;
            }
            default: {
                const std::size_t length = chance.below(std::min<std::size_t>(bytes.size() - at, 200) + 1);
                const Bytes part(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                                 bytes.begin() + static_cast<std::ptrdiff_t>(at + length));
                bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), part.begin(), part.end());
            }
        }
    }
    return bytes;
}

// Sends as many bytes as the socket accepts without blocking, up to `most`, and removes them from `bytes`.
void send_some(int fd, Bytes& bytes, std::size_t most) {
    const ssize_t n = send(fd, bytes.data(), std::min(most, bytes.size()), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) bytes.erase(bytes.begin(), bytes.begin() + n);
}

// Runs rank 0 of a group of two, with messages in progress and, if `collective` is true, in a broadcast. Rank 1 sends
// `control` and `bulk` and then disconnects.
void one_round(Bytes control, Bytes bulk, bool collective, RandomNumbers& chance) {
    const auto started = Clock::now();
    const auto [mine, theirs] = joined();
    const auto [my_bulk, their_bulk] = joined();
    std::vector<std::vector<tls::Socket>> sockets(2);
    sockets[1].emplace_back(mine);
    sockets[1].emplace_back(my_bulk);
    const auto lanes = link::LaneSet::create(nullptr, 1, 0, {0, -1}, std::move(sockets), started);
    Messenger messenger(*lanes);
    Executor executor(*lanes, messenger);
    Bytes small(100), large(kLarge), out(kLarge);
    std::vector<std::shared_ptr<Request>> requests;
    requests.push_back(messenger.send(1, 0, DType::u8, ByteStream({{out.data(), 100}}), kHung));
    requests.push_back(messenger.send(1, 0, DType::u8, stream_of(out), kHung));
    requests.push_back(messenger.send(1, 0, DType::u8, stream_of(out), kHung));
    requests.push_back(messenger.receive(1, 0, DType::u8, stream_of(small), kHung));
    requests.push_back(messenger.receive(kAnySource, 1, DType::u8, stream_of(large), kHung));
    Bytes heard(1 << 16);
    for (int i = 0; i < 64 && !(control.empty() && bulk.empty()); ++i) {
        send_some(theirs, control, 1 + chance.below(60'000));
        send_some(their_bulk, bulk, 1 + chance.below(60'000));
        if (chance.below(3) != 0) messenger.poll();
        static_cast<void>(recv(theirs, heard.data(), heard.size(), MSG_DONTWAIT));
    }
    ::close(theirs);
    ::close(their_bulk);
    if (collective) {
        std::vector<float> values(kTensor);
        Call call;
        call.operation = Operation::broadcast;
        call.dtype = DType::f32;
        call.reduce_op = ReduceOp::none;
        call.root = 1;
        call.count = kTensor;
        call.timeout_ns = kHung;
        call.outputs.push_back(stream_of(values));
        const std::int32_t steps[] = {1, 0, 1, 1, 0, 1, 1, 0, 0};
        call.schedule = Schedule::make(1, 1, 0, 2, steps);
        const Outcome outcome = executor.run(call, nullptr, false);
        CHECK(outcome.code != OutcomeCode::timed_out || outcome.reporter == 1);
    }
    for (const auto& request : requests) CHECK(messenger.wait(request, kHung, nullptr));
    messenger.close();
    CHECK(seconds_since(started) < kSoonS);
}

void every_stream_of_bytes_ends_in_an_orderly_failure(std::size_t rounds, std::uint64_t seed) {
    const std::vector<CorpusEntry> corpus = read_corpus();
    RandomNumbers chance(seed);
    for (std::size_t which = 0; which < corpus.size(); ++which) {  // each stream once without mutations
        const bool bulk = corpus[which].name.starts_with("bulk");
        one_round(bulk ? Bytes{} : corpus[which].bytes, bulk ? corpus[which].bytes : Bytes{}, true, chance);
    }
    for (std::size_t i = 0; i < rounds; ++i) {
        const std::size_t which = chance.below(corpus.size());
        Bytes bytes = mutated(corpus, which, chance);
        const bool bulk = corpus[which].name.starts_with("bulk") || chance.below(8) == 0;
        one_round(bulk ? Bytes{} : bytes, bulk ? bytes : Bytes{}, bulk || chance.below(2) == 0, chance);
    }
    CHECK(largest.load(std::memory_order_relaxed) < kMaxAllocated);
}

void a_damaged_failure_is_decoded_completely_or_rejected(std::size_t rounds, std::uint64_t seed) {
    RandomNumbers chance(seed);
    std::vector<CorpusEntry> corpus;
    for (const OutcomeCode code :
         {OutcomeCode::mismatch, OutcomeCode::timed_out, OutcomeCode::peer_lost, OutcomeCode::interrupted}) {
        corpus.push_back({"failure", failure(code)});
        CHECK(decode(corpus.back().bytes, 2));
    }
    for (std::size_t i = 0; i < rounds; ++i) {
        const Bytes bytes = mutated(corpus, chance.below(corpus.size()), chance);
        const auto outcome = decode(bytes, 2);
        if (!outcome) continue;
        CHECK(outcome->code != OutcomeCode::ok && outcome->reporter >= 0 && outcome->reporter < 2);
        for (const auto* ranks : {&outcome->missing, &outcome->gone, &outcome->left, &outcome->waiting})
            for (const int rank : *ranks) CHECK(rank >= 0 && rank < 2);
        CHECK(outcome->split_from >= -1 && outcome->split_from < 2 && outcome->split_to >= -1 && outcome->split_to < 2);
        for (const CallHeader& call : outcome->calls) CHECK(is_valid(call));
        if (outcome->code == OutcomeCode::mismatch) CHECK(outcome->calls.size() == 2);
        if (outcome->code == OutcomeCode::timed_out) CHECK(outcome->calls.empty() || outcome->calls.size() == 2);
        if (outcome->code == OutcomeCode::peer_lost) CHECK(!outcome->gone.empty());
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && std::string(argv[1]) == "--write") return write_corpus(), 0;
    const std::size_t rounds = argc > 1 ? std::stoul(argv[1]) : 1500;
    const std::uint64_t seed = argc > 2 ? std::stoul(argv[2]) : 1;
    every_stream_of_bytes_ends_in_an_orderly_failure(rounds, seed);
    a_damaged_failure_is_decoded_completely_or_rejected(20 * rounds, seed);
}
