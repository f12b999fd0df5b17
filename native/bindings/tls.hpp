// Transfer of connections from Python to the core.
#pragma once

#include <nanobind/nanobind.h>

#include "tls/socket.hpp"

namespace paceline::bindings {

// Takes ownership of a connection: a descriptor or a TlsConnection.
tls::Socket to_socket(nanobind::handle connection);

}  // namespace paceline::bindings
