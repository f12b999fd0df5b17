#include "tls/identity.hpp"

#include <algorithm>
#include <stdexcept>

namespace paceline::tls {
namespace {

// Settings that OpenSSL's headers define as macros.
constexpr int kEd25519 = 1087;
constexpr int kSetMode = 33, kSetSessionCacheMode = 44, kSetMinVersion = 123, kSetMaxVersion = 124;
constexpr long kTls13 = 0x0304;
constexpr long kPartialWrite = 1, kMovingWriteBuffer = 2, kReleaseBuffers = 16;
constexpr long kNoSessionCache = 0;
constexpr std::uint64_t kEndsWithoutNotice = 1 << 7;  // the transported frames show whether a stream is complete
constexpr int kVerifyPeer = 1, kFailWithoutCertificate = 2;
constexpr std::size_t kReadAheadBytes = 64 << 10;  // bytes per system call, enough for four records
// AES-128 is fastest on processors with AES instructions, ChaCha20 on all others.
constexpr const char* kCiphers = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256:TLS_AES_256_GCM_SHA384";

constexpr std::size_t kPublicBytes = 32, kSignatureBytes = 64;

// The signed part of the X.509 certificate, up to the public key (RFC 5280, RFC 8410): version 3, serial number 1,
// Ed25519, issuer and subject CN=paceline, valid from 1970-01-01 to 9999-12-31.
constexpr std::uint8_t kToBeSigned[] = {
    0x30, 0x81, 0x87, 0xA0, 0x03, 0x02, 0x01, 0x02, 0x02, 0x01, 0x01, 0x30, 0x05, 0x06, 0x03, 0x2B, 0x65, 0x70,
    0x30, 0x13, 0x31, 0x11, 0x30, 0x0F, 0x06, 0x03, 0x55, 0x04, 0x03, 0x0C, 0x08, 'p',  'a',  'c',  'e',  'l',
    'i',  'n',  'e',  0x30, 0x20, 0x17, 0x0D, '7',  '0',  '0',  '1',  '0',  '1',  '0',  '0',  '0',  '0',  '0',
    '0',  'Z',  0x18, 0x0F, '9',  '9',  '9',  '9',  '1',  '2',  '3',  '1',  '2',  '3',  '5',  '9',  '5',  '9',
    'Z',  0x30, 0x13, 0x31, 0x11, 0x30, 0x0F, 0x06, 0x03, 0x55, 0x04, 0x03, 0x0C, 0x08, 'p',  'a',  'c',  'e',
    'l',  'i',  'n',  'e',  0x30, 0x2A, 0x30, 0x05, 0x06, 0x03, 0x2B, 0x65, 0x70, 0x03, 0x21, 0x00};
constexpr std::uint8_t kWhole[] = {0x30, 0x81, 0xD4};
constexpr std::uint8_t kSignature[] = {0x30, 0x05, 0x06, 0x03, 0x2B, 0x65, 0x70, 0x03, 0x41, 0x00};
static_assert(sizeof kToBeSigned + kPublicBytes == 3 + 0x87);
static_assert(sizeof kToBeSigned + kPublicBytes + sizeof kSignature + kSignatureBytes == 0xD4);
static_assert(sizeof kWhole + 0xD4 == kCertificateBytes);

const Library& required_library() {
    const auto& found = library();
    if (const auto* const missing = std::get_if<std::string>(&found)) throw std::runtime_error(*missing);
    return *std::get<const Library*>(found);
}

void require(bool went, const Library& library, const char* what) {
    if (!went)
        throw std::runtime_error(std::string("OpenSSL refuses ") + what + " (" + library.take_error_message() +
                                 "), which encrypted connections need");
}

// A key, freed at the end of its scope.
class PrivateKey {
  public:
    PrivateKey(const Library& library, Seed seed)
        : library_(library), key_(library.EVP_PKEY_new_raw_private_key(kEd25519, nullptr, seed.data(), seed.size())) {
        require(key_ != nullptr, library_, "an Ed25519 key");
    }
    PrivateKey(const PrivateKey&) = delete;
    PrivateKey& operator=(const PrivateKey&) = delete;
    ~PrivateKey() { library_.EVP_PKEY_free(key_); }

    evp_pkey_st* get() const { return key_; }

    std::array<std::uint8_t, kPublicBytes> public_part() const {
        std::array<std::uint8_t, kPublicBytes> bytes{};
        std::size_t n = bytes.size();
        require(library_.EVP_PKEY_get_raw_public_key(key_, bytes.data(), &n) == 1 && n == bytes.size(), library_,
                "an Ed25519 key's public part");
        return bytes;
    }

    std::array<std::uint8_t, kSignatureBytes> sign(std::span<const std::uint8_t> message) const {
        std::array<std::uint8_t, kSignatureBytes> bytes{};
        std::size_t n = bytes.size();
        evp_md_ctx_st* const context = library_.EVP_MD_CTX_new();
        const bool went = context != nullptr &&
                          library_.EVP_DigestSignInit(context, nullptr, nullptr, nullptr, key_) == 1 &&
                          library_.EVP_DigestSign(context, bytes.data(), &n, message.data(), message.size()) == 1 &&
                          n == bytes.size();
        library_.EVP_MD_CTX_free(context);
        require(went, library_, "an Ed25519 signature");
        return bytes;
    }

  private:
    const Library& library_;
    evp_pkey_st* key_;
};

Certificate certificate_of(const PrivateKey& key) {
    Certificate whole{};
    const auto signed_from = std::copy(std::begin(kWhole), std::end(kWhole), whole.begin());
    const auto public_part = key.public_part();
    auto end = std::copy(std::begin(kToBeSigned), std::end(kToBeSigned), signed_from);
    end = std::copy(public_part.begin(), public_part.end(), end);
    const auto signature = key.sign({signed_from, end});
    end = std::copy(std::begin(kSignature), std::end(kSignature), end);
    std::copy(signature.begin(), signature.end(), end);
    return whole;
}

}  // namespace

Identity::Identity(Seed seed, std::uint64_t records_per_key)
    : library_(required_library()), records_per_key_(records_per_key) {
    library_.ERR_clear_error();
    const PrivateKey key(library_, seed);
    certificate_ = certificate_of(key);
    context_ = library_.SSL_CTX_new(library_.TLS_method());
    require(context_ != nullptr, library_, "a context");
    try {
        require(library_.SSL_CTX_ctrl(context_, kSetMinVersion, kTls13, nullptr) == 1 &&
                    library_.SSL_CTX_ctrl(context_, kSetMaxVersion, kTls13, nullptr) == 1 &&
                    library_.SSL_CTX_set_ciphersuites(context_, kCiphers) == 1,
                library_, "TLS 1.3");
        require(library_.SSL_CTX_use_certificate_ASN1(context_, static_cast<int>(certificate_.size()),
                                                      certificate_.data()) == 1 &&
                    library_.SSL_CTX_use_PrivateKey(context_, key.get()) == 1,
                library_, "the job's certificate");
    } catch (...) {
        library_.SSL_CTX_free(context_);
        throw;
    }
    library_.SSL_CTX_ctrl(context_, kSetMode, kPartialWrite | kMovingWriteBuffer | kReleaseBuffers, nullptr);
    library_.SSL_CTX_ctrl(context_, kSetSessionCacheMode, kNoSessionCache, nullptr);
    library_.SSL_CTX_set_options(context_, kEndsWithoutNotice);
    library_.SSL_CTX_set_num_tickets(context_, 0);
    library_.SSL_CTX_set_default_read_buffer_len(context_, kReadAheadBytes);
    library_.SSL_CTX_set_verify(context_, kVerifyPeer | kFailWithoutCertificate, nullptr);
    library_.SSL_CTX_set_cert_verify_callback(context_, &Identity::verify, this);
}

Identity::~Identity() {
    library_.SSL_CTX_free(context_);
}

// Accepts only the job's own certificate. OpenSSL checks the handshake's signature, which proves that the peer has the
// certificate's key.
int Identity::verify(x509_store_ctx_st* presented, void* self) {
    const auto& identity = *static_cast<const Identity*>(self);
    const x509_st* const theirs = identity.library_.X509_STORE_CTX_get0_cert(presented);
    if (theirs == nullptr) return 0;
    const int n = identity.library_.i2d_X509(theirs, nullptr);
    if (n != static_cast<int>(kCertificateBytes)) return 0;
    Certificate der{};
    unsigned char* to = der.data();
    identity.library_.i2d_X509(theirs, &to);
    return der == identity.certificate_ ? 1 : 0;
}

}  // namespace paceline::tls
