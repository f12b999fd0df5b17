// The TLS identity of a job's members: a key and a certificate, both derived from 32 secret bytes.
//
// Every process with the seed derives the same Ed25519 key (RFC 8410) and, because Ed25519 signatures are
// deterministic, a bitwise equal self-signed certificate. Therefore only the seed has to be distributed, and each side
// of a connection accepts only the certificate that it also presents. The certificate does not identify individual
// processes. It never expires, because clocks may differ and the secret is discarded at the end of the job.
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
// RFC 8446 allows 2^24.5 full records per AES-GCM key. The writer updates its key earlier, after 128 GiB.
constexpr std::uint64_t kRecordsPerKey = std::uint64_t{1} << 23;

using Certificate = std::array<std::uint8_t, kCertificateBytes>;  // DER
using Seed = std::span<const std::uint8_t, kSeedBytes>;

// Settings for both sides of all connections in a job: TLS 1.3 only, no tickets, and the certificate.
class Identity {
  public:
    // Throws std::runtime_error with a user-readable message if OpenSSL is missing or reports an error.
    explicit Identity(Seed seed, std::uint64_t records_per_key = kRecordsPerKey);
    Identity(const Identity&) = delete;
    Identity& operator=(const Identity&) = delete;
    ~Identity();

    const Library& library() const { return library_; }
    ssl_ctx_st* context() const { return context_; }
    std::uint64_t records_per_key() const { return records_per_key_; }
    const Certificate& certificate() const { return certificate_; }

  private:
    static int verify(x509_store_ctx_st* presented, void* self);

    const Library& library_;
    const std::uint64_t records_per_key_;
    ssl_ctx_st* context_ = nullptr;
    Certificate certificate_{};
};

}  // namespace paceline::tls
