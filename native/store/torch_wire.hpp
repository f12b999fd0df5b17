// The wire protocol of PyTorch's TCPStore, so that its clients can connect to Paceline's server. Uses no sockets.
//
//   u8 query | u64 count, if the query has several keys | (u64 length | bytes) for each key or value | number
//
// Numbers are little-endian and not aligned. The first query of a connection is `validate`. Clients are not
// authenticated: the limits are those of PyTorch's own server, and memory is allocated only as the bytes arrive.
#pragma once

#include "store/table.hpp"

namespace paceline::store {

// The values are those of PyTorch; new PyTorch releases only append values.
enum class TorchQuery : std::uint8_t {
    validate = 0,  // number: kTorchMagic; has no answer, like all queries that only set a value
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
    barrier,  // key, number: the number of clients that synchronize
};

constexpr std::uint32_t kTorchMagic = 0x3C85F7CE;
constexpr std::uint64_t kMaxTorchKeys = 128 << 10;
constexpr std::uint64_t kMaxTorchKeyBytes = 8 << 10;
constexpr std::uint64_t kMaxTorchValueBytes = 8 << 20;
constexpr std::size_t kMaxTorchBytes = std::size_t{1}
                                       << 30;  // total for keys, values and messages; PyTorch's server has no limit

enum class TorchWaitReply : std::uint8_t { over = 0, canceled = 1 };

// Reads the queries of one connection. A query may arrive in many parts, each of which is parsed once.
class TorchReader {
  public:
    // Parses the query at the front of `bytes`. Sets `used` to its length once it is complete.
    ParseResult read(std::span<const char> bytes, std::size_t& used);

    // These functions return the type of the complete query and, if there is one, the equivalent request to the table.
    TorchQuery query() const { return query_; }
    Message& request() { return request_; }

    // Returns how many bytes of an incomplete query this object stores. The caller's own copy is not counted.
    std::size_t nbytes() const { return at_; }

  private:
    TorchQuery query_ = TorchQuery::validate;
    Message request_;
    std::size_t at_ = 0;      // number of bytes of the current query that have been parsed
    bool counted_ = false;    // whether the query's count has been parsed
    std::uint64_t left_ = 0;  // number of keys and values still to be parsed
};

void encode(TorchWaitReply answer, std::string& out);

enum class TorchOutcome { answered, waits, refused };

// Applies any query except validate, cancel_wait and barrier to the table, and appends the answer to `out`. The
// connection is closed after a refused query, because the protocol has no error responses.
TorchOutcome apply(TorchQuery query, const Message& request, Table& table, std::vector<std::string>& changed,
                   std::string& out);

}  // namespace paceline::store
