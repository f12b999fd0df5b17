// Mutual proof of the job's secret, the first thing on every connection.
//
// Three messages, at most 256 bytes, nothing of a peer is used before its proof is checked:
//   connecting -> accepting   hello: magic, version, channel, rank, generation, nonce
//   accepting  -> connecting  nonce, HMAC-SHA256(key, "S" | transcript)
//   connecting -> accepting   HMAC-SHA256(key, "C" | transcript | first proof)
// Direction labels stop reflection, nonces stop replay, the channel name stops splicing a connection of one
// service into another.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace paceline::auth {

using Key = std::array<std::uint8_t, 32>;
using Deadline = std::chrono::steady_clock::time_point;

struct Hello {
    std::string channel;  // at most 32 bytes, e.g. "store" or "mesh"
    std::uint32_t rank = 0;
    std::uint64_t generation = 0;
};

enum class Verdict { accepted, refused, malformed, closed, timed_out };

// HKDF-SHA256 (RFC 5869) of the job's secret, bound to `context`.
Key derive_key(std::span<const std::uint8_t> secret, std::string_view context);

// The connecting side. Blocks on `fd` (of either blocking mode) until done or `deadline`.
Verdict prove(int fd, const Key& key, const Hello& mine, Deadline deadline);

// The accepting side; fills `peer` when accepted. Refuses another channel or generation.
Verdict verify(int fd, const Key& key, std::string_view channel, std::uint64_t generation, Deadline deadline,
               Hello& peer);

}  // namespace paceline::auth
