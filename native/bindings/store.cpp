// Bindings for the store's server and client, used by paceline.comm.store. Values are bytes.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <chrono>
#include <memory>

#include "bindings/bindings.hpp"
#include "bindings/calls.hpp"
#include "bindings/tls.hpp"
#include "store/client.hpp"
#include "store/server.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

using store::Client;
using store::Message;

Message to_message(int op, std::int64_t number, const std::vector<nb::bytes>& fields) {
    Message message{static_cast<std::uint8_t>(op), number, {}};
    std::size_t nbytes = store::kMessageOverhead;
    for (const nb::bytes& field : fields) nbytes += store::kFieldOverhead + field.size();
    if (nbytes > store::kMaxFrame) {
        const std::string message = "the keys and values of one call to a store are " + std::to_string(nbytes) +
                                    " bytes together; at most " + std::to_string(store::kMaxFrame) +
                                    " go at once, so set them in parts";
        throw nb::value_error(message.c_str());
    }
    for (const nb::bytes& field : fields) message.fields.emplace_back(field.c_str(), field.size());
    return message;
}

nb::list to_list(const std::vector<std::string>& fields) {
    nb::list values;
    for (const std::string& field : fields) values.append(nb::bytes(field.data(), field.size()));
    return values;
}

// In a forked child the server's thread does not exist, so the server can be neither closed nor destroyed there.
class OwnedServer {
  public:
    explicit OwnedServer(int listener) : owner_(getpid()), server_(std::make_unique<store::Server>(listener)) {}
    OwnedServer(const OwnedServer&) = delete;
    OwnedServer& operator=(const OwnedServer&) = delete;
    ~OwnedServer() {
        if (owner_ != getpid()) static_cast<void>(server_.release());
    }
    void adopt(nb::handle connection) {
        tls::Socket socket = to_socket(connection);
        if (owner_ == getpid())
            server_->adopt(std::move(socket));
        else
            ::close(socket.descriptor);
    }
    void close() {
        if (owner_ == getpid()) server_->close();
    }

  private:
    pid_t owner_;
    std::unique_ptr<store::Server> server_;
};

// Returns (result, status, number, fields); the last three are valid only if the result is `answered`.
nb::tuple call(Client& client, int op, std::int64_t number, const std::vector<nb::bytes>& fields, double timeout_s) {
    const Message request = to_message(op, number, fields);
    Message answer;
    Client::Result result{};
    {
        const nb::gil_scoped_release release;
        result = client.call(request, answer, deadline_in(timeout_s), python_interrupted);
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return nb::make_tuple(static_cast<int>(result), static_cast<int>(answer.code), answer.number,
                          to_list(answer.fields));
}

// Returns (status, number, fields), or None if the request must wait for a key.
nb::object apply(store::Table& table, int op, std::int64_t number, const std::vector<nb::bytes>& fields) {
    std::vector<std::string> changed;
    const auto answer = table.apply(to_message(op, number, fields), changed);
    if (!answer) return nb::none();
    return nb::make_tuple(static_cast<int>(answer->code), answer->number, to_list(answer->fields));
}

nb::list missing(const store::Table& table, int op, const std::vector<nb::bytes>& keys) {
    return to_list(table.missing(to_message(op, 0, keys)));
}

}  // namespace

void register_store(nb::module_& module) {
    nb::class_<store::Table>(module, "StoreTable")
        .def(nb::init<>())
        .def("apply", &apply, nb::arg("op"), nb::arg("number"), nb::arg("fields"))
        .def("missing", &missing, nb::arg("op"), nb::arg("keys"));
    nb::class_<OwnedServer>(module, "StoreServer")
        .def(nb::init<int>(), nb::arg("listener") = -1)
        .def("adopt", &OwnedServer::adopt, nb::arg("connection"))
        .def("close", &OwnedServer::close, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Client>(module, "StoreClient")
        .def(nb::new_([](nb::handle connection) { return std::make_unique<Client>(to_socket(connection)); }),
             nb::arg("connection"))
        .def("call", &call, nb::arg("op"), nb::arg("number"), nb::arg("fields"), nb::arg("timeout_s"))
        .def("close", &Client::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace paceline::bindings
