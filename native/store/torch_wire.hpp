// The wire protocol of PyTorch's TCPStore, so that its clients can use the store's server. It uses no sockets.
//
//   u8 query | u64 count, if the query is about several keys | (u64 length | bytes) for each key or value | number
// Numbers are little-endian and not aligned. The first query of a connection is `validate`. Clients are not
// authenticated: the limits are those of PyTorch's own server, and no memory is allocated for a length before that many
// bytes have arrived.
#pragma once

#include "store/table.hpp"

namespace paceline::store {

// The values are PyTorch's; releases only append to them.
enum class TorchQuery : std::uint8_t {
    validate = 0,  // number: kTorchMagic; without an answer, as all queries that only set something
    set,
    compare_set,
    get,
    add,
    check,
    wait,
    count,
    remove,
    append,
    multi_get,
    multi_set,
    cancel_wait,
    ping,
    queue_push,
    queue_pop,
    queue_length,
    list_keys,
    barrier,  // key, number: how many clients meet
};

constexpr std::uint32_t kTorchMagic = 0x3C85F7CE;
constexpr std::uint64_t kMostTorchKeys = 128 << 10;
constexpr std::uint64_t kLongestTorchKey = 8 << 10;
constexpr std::uint64_t kLongestTorchValue = 8 << 20;
constexpr std::size_t kMostTorchBytes = std::size_t{1} << 30;  // of all keys, values and messages; PyTorch has no limit

enum class TorchWait : std::uint8_t { over = 0, canceled = 1 };

// Reads the queries of one connection. A query may arrive in many parts, each of which is looked at once.
class TorchReader {
  public:
    // Reads from `bytes`, which begin with the current query; `used` is set to its length when it is complete.
    Parse read(std::span<const char> bytes, std::size_t& used);

    // The complete query, and its keys, values and number as a request to the table where that has one like it.
    TorchQuery query() const { return query_; }
    Message& request() { return request_; }

    // How much of an incomplete query has been read; it is held here as well as by the caller.
    std::size_t nbytes() const { return at_; }

  private:
    TorchQuery query_ = TorchQuery::validate;
    Message request_;
    std::size_t at_ = 0;      // how much of the current query has been read
    bool counted_ = false;    // whether its count has been read
    std::uint64_t left_ = 0;  // how many keys and values follow
};

void encode(TorchWait answer, std::string& out);

enum class TorchOutcome { answered, waits, refused };

// Applies a query other than validate, cancel_wait and barrier to the table, and appends its answer to `out`.
// A refused query ends its connection, since the protocol has no errors.
TorchOutcome apply(TorchQuery query, const Message& request, Table& table, std::vector<std::string>& changed,
                   std::string& out);

}  // namespace paceline::store
