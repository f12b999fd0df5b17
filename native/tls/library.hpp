// Loads OpenSSL when the first connection is encrypted. The build requires neither its headers nor its libraries.
//
// Only the functions that Paceline uses are declared; they are identical in OpenSSL 1.1.1, 3 and 4. All types are
// opaque. The library is never unloaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

extern "C" {
struct ssl_st;
struct ssl_ctx_st;
struct ssl_method_st;
struct bio_st;
struct bio_method_st;
struct evp_pkey_st;
struct evp_md_ctx_st;
struct x509_st;
struct x509_store_ctx_st;
}

namespace paceline::tls {

// Names and types of OpenSSL's functions; `X(result, name, parameters)` for each.
#define PACELINE_OPENSSL(X)                                                                                   \
    X(const ssl_method_st*, TLS_method, ())                                                                   \
    X(ssl_ctx_st*, SSL_CTX_new, (const ssl_method_st*))                                                       \
    X(void, SSL_CTX_free, (ssl_ctx_st*))                                                                      \
    X(long, SSL_CTX_ctrl, (ssl_ctx_st*, int, long, void*))                                                    \
    X(std::uint64_t, SSL_CTX_set_options, (ssl_ctx_st*, std::uint64_t))                                       \
    X(int, SSL_CTX_set_ciphersuites, (ssl_ctx_st*, const char*))                                              \
    X(int, SSL_CTX_set_num_tickets, (ssl_ctx_st*, std::size_t))                                               \
    X(void, SSL_CTX_set_default_read_buffer_len, (ssl_ctx_st*, std::size_t))                                  \
    X(int, SSL_CTX_use_certificate_ASN1, (ssl_ctx_st*, int, const unsigned char*))                            \
    X(int, SSL_CTX_use_PrivateKey, (ssl_ctx_st*, evp_pkey_st*))                                               \
    X(void, SSL_CTX_set_verify, (ssl_ctx_st*, int, int (*)(int, x509_store_ctx_st*)))                         \
    X(void, SSL_CTX_set_cert_verify_callback, (ssl_ctx_st*, int (*)(x509_store_ctx_st*, void*), void*))       \
    X(ssl_st*, SSL_new, (ssl_ctx_st*))                                                                        \
    X(void, SSL_free, (ssl_st*))                                                                              \
    X(void, SSL_set_bio, (ssl_st*, bio_st*, bio_st*))                                                         \
    X(void, SSL_set_read_ahead, (ssl_st*, int))                                                               \
    X(void, SSL_set_accept_state, (ssl_st*))                                                                  \
    X(void, SSL_set_connect_state, (ssl_st*))                                                                 \
    X(int, SSL_do_handshake, (ssl_st*))                                                                       \
    X(int, SSL_read, (ssl_st*, void*, int))                                                                   \
    X(int, SSL_write, (ssl_st*, const void*, int))                                                            \
    X(int, SSL_key_update, (ssl_st*, int))                                                                    \
    X(int, SSL_get_error, (const ssl_st*, int))                                                               \
    X(int, OPENSSL_init_crypto, (std::uint64_t, const void*))                                                 \
    X(bio_method_st*, BIO_meth_new, (int, const char*))                                                       \
    X(int, BIO_meth_set_read, (bio_method_st*, int (*)(bio_st*, char*, int)))                                 \
    X(int, BIO_meth_set_write, (bio_method_st*, int (*)(bio_st*, const char*, int)))                          \
    X(int, BIO_meth_set_ctrl, (bio_method_st*, long (*)(bio_st*, int, long, void*)))                          \
    X(bio_st*, BIO_new, (const bio_method_st*))                                                               \
    X(int, BIO_free, (bio_st*))                                                                               \
    X(void, BIO_set_data, (bio_st*, void*))                                                                   \
    X(void*, BIO_get_data, (bio_st*))                                                                         \
    X(void, BIO_set_init, (bio_st*, int))                                                                     \
    X(void, BIO_set_flags, (bio_st*, int))                                                                    \
    X(void, BIO_clear_flags, (bio_st*, int))                                                                  \
    X(evp_pkey_st*, EVP_PKEY_new_raw_private_key, (int, void*, const unsigned char*, std::size_t))            \
    X(int, EVP_PKEY_get_raw_public_key, (const evp_pkey_st*, unsigned char*, std::size_t*))                   \
    X(void, EVP_PKEY_free, (evp_pkey_st*))                                                                    \
    X(evp_md_ctx_st*, EVP_MD_CTX_new, ())                                                                     \
    X(void, EVP_MD_CTX_free, (evp_md_ctx_st*))                                                                \
    X(int, EVP_DigestSignInit, (evp_md_ctx_st*, void*, const void*, void*, evp_pkey_st*))                     \
    X(int, EVP_DigestSign, (evp_md_ctx_st*, unsigned char*, std::size_t*, const unsigned char*, std::size_t)) \
    X(int, i2d_X509, (const x509_st*, unsigned char**))                                                       \
    X(x509_st*, X509_STORE_CTX_get0_cert, (const x509_store_ctx_st*))                                         \
    X(unsigned long, ERR_get_error, ())                                                                       \
    X(void, ERR_clear_error, ())                                                                              \
    X(void, ERR_error_string_n, (unsigned long, char*, std::size_t))

struct Library {
#define PACELINE_DECLARE(result, name, parameters) result(*name) parameters = nullptr;
    PACELINE_OPENSSL(PACELINE_DECLARE)
#undef PACELINE_DECLARE

    // Returns and clears OpenSSL's latest error message for the calling thread, if any.
    std::string take_error_message() const;
};

// Returns the paths of libssl to try, in order of preference: the libssl mapped by this process, libssl next to a
// mapped libcrypto, and names that the loader resolves. `maps` is the text of /proc/self/maps.
std::vector<std::string> libssl_paths(std::string_view maps);

// Loads libssl from the first usable path in `places`, or returns an error message that lists the paths tried.
std::variant<const Library*, std::string> load(const std::vector<std::string>& places);

// Returns the process's library, or an error message if it could not be loaded.
const std::variant<const Library*, std::string>& library();

}  // namespace paceline::tls
