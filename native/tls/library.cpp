#include "tls/library.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <memory>

namespace paceline::tls {
namespace {

constexpr std::array<std::string_view, 3> kVersions = {".so.3", ".so.4", ".so.1.1"};
constexpr std::uint64_t kNoCleanupAtExit = 0x00080000;  // OPENSSL_INIT_NO_ATEXIT: threads may still use OpenSSL at exit

// Returns the version suffix if `path` is a file of `library`: ".so.3" for /usr/lib/libssl.so.3.
std::string_view version_of(std::string_view path, std::string_view library) {
    for (const std::string_view version : kVersions) {
        const std::string_view name = path.substr(std::min(path.rfind('/') + 1, path.size()));
        if (name.size() == library.size() + version.size() && name.starts_with(library) && name.ends_with(version))
            return version;
    }
    return {};
}

void add(std::vector<std::string>& places, std::string place) {
    if (std::find(places.begin(), places.end(), place) == places.end()) places.push_back(std::move(place));
}

template <class Function>
bool find(void* handle, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(handle, name));
    return function != nullptr;
}

bool resolve(void* handle, Library& library) {
    bool complete = true;
#define PACELINE_RESOLVE(result, name, parameters) complete = find(handle, #name, library.name) && complete;
    PACELINE_OPENSSL(PACELINE_RESOLVE)
#undef PACELINE_RESOLVE
    return complete;
}

// RTLD_DEEPBIND makes a libssl found by the loader use its own libcrypto, even if the interpreter exports the symbols
// of a different, statically linked libcrypto. The sanitizers do not permit this flag.
int flags_for(const std::string& place) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(RTLD_DEEPBIND)
    static_cast<void>(place);
    return RTLD_NOW | RTLD_LOCAL;
#else
    return RTLD_NOW | RTLD_LOCAL | (place.find('/') == std::string::npos ? RTLD_DEEPBIND : 0);
#endif
}

}  // namespace

std::string Library::take_error_message() const {
    std::array<char, 256> text{};
    const unsigned long code = ERR_get_error();
    ERR_clear_error();
    if (code == 0) return {};
    ERR_error_string_n(code, text.data(), text.size());
    const std::string message = text.data();
    return message.substr(message.rfind(':') + 1);  // error:0A000086:SSL routines::certificate verify failed
}

std::vector<std::string> libssl_paths(std::string_view maps) {
    std::vector<std::string> mapped, beside;
    for (std::size_t from = 0; from < maps.size();) {
        const std::size_t end = std::min(maps.find('\n', from), maps.size());
        const std::string_view line = maps.substr(from, end - from);
        from = end + 1;
        const std::size_t slash = line.find('/');
        if (slash == std::string_view::npos) continue;
        const std::string_view path = line.substr(slash);
        if (!version_of(path, "libssl").empty()) add(mapped, std::string(path));
        if (const std::string_view version = version_of(path, "libcrypto"); !version.empty())
            add(beside, std::string(path.substr(0, path.rfind('/') + 1)) + "libssl" + std::string(version));
    }
    for (std::string& place : beside) add(mapped, std::move(place));
    for (const std::string_view version : kVersions) add(mapped, "libssl" + std::string(version));
    return mapped;
}

std::variant<const Library*, std::string> load(const std::vector<std::string>& places) {
    std::string tried;
    for (const std::string& place : places) {
        tried += (tried.empty() ? "" : ", ") + place;
        void* const handle = dlopen(place.c_str(), flags_for(place));
        if (handle == nullptr) continue;
        auto library = std::make_unique<Library>();
        // Looking up libcrypto's functions through libssl works because libssl depends on libcrypto.
        if (resolve(handle, *library)) {
            library->OPENSSL_init_crypto(kNoCleanupAtExit, nullptr);
            return library.release();
        }
        dlclose(handle);
        tried += " (which lacks functions)";
    }
    return "encrypted connections need OpenSSL (libssl 3, 4 or 1.1.1), which is not on this machine; tried " + tried +
           ". Install it (package libssl3 or openssl), or start the job with --security auth on a network that you "
           "trust";
}

const std::variant<const Library*, std::string>& library() {
    static const auto found = [] {
        std::ifstream file("/proc/self/maps");
        return load(libssl_paths(std::string(std::istreambuf_iterator<char>(file), {})));
    }();
    return found;
}

}  // namespace paceline::tls
