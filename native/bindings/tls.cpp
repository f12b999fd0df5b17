// Bindings for encrypted connections, used by paceline.comm.security. In Python, a connection behaves like a socket
// with a timeout until `take` passes its ownership to the store or a lane.
#include "bindings/tls.hpp"

#include <fcntl.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <system_error>

#include "bindings/calls.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

using Clock = std::chrono::steady_clock;
using tls::Session;

constexpr std::int64_t kSliceMs = 100;
constexpr std::size_t kRecordBytes = 16 << 10;

// Throws an exception that becomes an OSError with this errno.
[[noreturn]] void fail(int number, const std::string& what) {
    throw std::system_error(number, std::generic_category(), what);
}

}  // namespace

// A connection whose socket is closed by its Python owner unless `take` was called. Thread-safe.
class TlsConnection {
  public:
    TlsConnection(std::shared_ptr<tls::Identity> identity, int socket, bool accepts) : descriptor_(socket) {
        fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
        session_ = std::make_unique<Session>(
            std::move(identity), socket, accepts ? tls::ConnectionRole::accepting : tls::ConnectionRole::connecting);
    }

    // Returns an empty string on success, or the reason why one end rejected the other. Throws if the connection is
    // lost.
    std::string handshake(double timeout_s) {
        const auto deadline = deadline_in(timeout_s);
        const nb::gil_scoped_release release;
        for (;;) {
            switch (session().handshake()) {
                case Session::HandshakeResult::done:
                    return {};
                case Session::HandshakeResult::failed:
                    if (session().reason().empty()) fail(ECONNRESET, "an encrypted connection");
                    return session().reason();
                case Session::HandshakeResult::wants_to_read:
                    wait(POLLIN, deadline);
                    break;
                case Session::HandshakeResult::wants_to_write:
                    wait(POLLOUT, deadline);
            }
        }
    }

    void send(const nb::bytes& data, double timeout_s) {
        const auto deadline = deadline_in(timeout_s);
        const nb::gil_scoped_release release;
        for (std::size_t sent = 0; sent < data.size();) {
            const ssize_t n =
                exchange([&](Session& over) { return over.send(data.c_str() + sent, data.size() - sent); });
            if (n < 0)
                wait(POLLOUT, deadline);
            else
                sent += static_cast<std::size_t>(n);
        }
    }

    // Returns an empty bytes object if the other end has closed the connection.
    nb::bytes receive(std::size_t max_bytes, double timeout_s) {
        const auto deadline = deadline_in(timeout_s);
        std::array<char, kRecordBytes> data;
        ssize_t n = -1;
        {
            const nb::gil_scoped_release release;
            while (n < 0) {
                n = exchange([&](Session& over) { return over.recv(data.data(), std::min(max_bytes, data.size())); });
                if (n < 0) wait(POLLIN, deadline);
            }
        }
        return nb::bytes(data.data(), static_cast<std::size_t>(n));
    }

    tls::Socket take() {
        session();
        return {descriptor_, std::move(session_)};
    }

  private:
    Session& session() {
        if (!session_) throw nb::value_error("this connection has been handed over");
        return *session_;
    }

    // Returns -1 if the operation must wait for the other end; throws if the connection is broken.
    template <class Step>
    ssize_t exchange(Step step) {
        const std::lock_guard lock(using_);
        const ssize_t n = step(session());
        if (n < 0 && errno != EAGAIN) {
            const std::string& reason = session().reason();
            fail(errno, reason.empty() ? "an encrypted connection" : "an encrypted connection (" + reason + ")");
        }
        return n;
    }

    void wait(short events, Clock::time_point deadline) {
        for (;;) {
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
            pollfd watched{descriptor_, events, 0};
            const auto slice = std::clamp<std::int64_t>(left, 0, kSliceMs);
            if (poll(&watched, 1, static_cast<int>(slice)) > 0) return;
            if (left <= 0) fail(ETIMEDOUT, "the other end of an encrypted connection");
            if (python_interrupted()) {
                const nb::gil_scoped_acquire gil;
                throw nb::python_error();
            }
        }
    }

    const int descriptor_;
    std::mutex using_;
    std::unique_ptr<Session> session_;
};

tls::Socket to_socket(nb::handle connection) {
    if (nb::isinstance<TlsConnection>(connection)) return nb::cast<TlsConnection&>(connection).take();
    return nb::cast<int>(connection);
}

namespace {

std::shared_ptr<tls::Identity> make_identity(const nb::bytes& seed) {
    if (seed.size() != tls::kSeedBytes) throw nb::value_error("a seed has 32 bytes");
    return std::make_shared<tls::Identity>(
        tls::Seed(reinterpret_cast<const std::uint8_t*>(seed.c_str()), tls::kSeedBytes));
}

}  // namespace

void register_tls(nb::module_& module) {
    nb::class_<tls::Identity>(module, "TlsIdentity").def(nb::new_(&make_identity), nb::arg("seed"));
    nb::class_<TlsConnection>(module, "TlsConnection")
        .def(nb::init<std::shared_ptr<tls::Identity>, int, bool>(), nb::arg("identity"), nb::arg("socket"),
             nb::arg("accepts"))
        .def("handshake", &TlsConnection::handshake, nb::arg("timeout_s"))
        .def("send", &TlsConnection::send, nb::arg("data"), nb::arg("timeout_s"))
        .def("receive", &TlsConnection::receive, nb::arg("max_bytes"), nb::arg("timeout_s"));
}

}  // namespace paceline::bindings
