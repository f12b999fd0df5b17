// The identity with which the members of a job authenticate: one key and one certificate, both derived from 32 secret
// bytes.
//
// Every process that holds the seed derives the same Ed25519 key (RFC 8410) and, since such signatures are
// deterministic, a bitwise equal self-signed certificate. Only the seed therefore has to be distributed to the members,
// and each side of a connection accepts exactly the certificate that it presents itself. The certificate identifies no
// single process and never expires: clocks may differ, and the job's secret ends with the job.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "tls/library.hpp"

namespace paceline::tls {

constexpr std::size_t kSeedBytes = 32;
constexpr std::size_t kCertificateBytes = 215;
// RFC 8446 allows 2^24.5 full records per AES-GCM key; the writer changes its key well before that (after 128 GiB).
constexpr std::uint64_t kRecordsOfAKey = std::uint64_t{1} << 23;

using Certificate = std::array<std::uint8_t, kCertificateBytes>;  // DER
using Seed = std::span<const std::uint8_t, kSeedBytes>;

// The settings of all connections of a job, on both sides: TLS 1.3 only, no tickets, and the certificate.
class Identity {
  public:
    // Throws std::runtime_error with a message for the user if there is no OpenSSL, or if it reports an error.
    explicit Identity(Seed seed, std::uint64_t records_of_a_key = kRecordsOfAKey);
    Identity(const Identity&) = delete;
    Identity& operator=(const Identity&) = delete;
    ~Identity();

    const Library& library() const { return library_; }
    ssl_ctx_st* context() const { return context_; }
    std::uint64_t records_of_a_key() const { return records_of_a_key_; }
    const Certificate& certificate() const { return certificate_; }

  private:
    static int verify(x509_store_ctx_st* presented, void* self);

    const Library& library_;
    const std::uint64_t records_of_a_key_;
    ssl_ctx_st* context_ = nullptr;
    Certificate certificate_{};
};

}  // namespace paceline::tls
