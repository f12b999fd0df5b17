// How connections that Python has made get into the core.
#pragma once

#include <nanobind/nanobind.h>

#include "tls/socket.hpp"

namespace paceline::bindings {

// Takes over a connection: a descriptor, or a TlsConnection.
tls::Socket to_socket(nanobind::handle connection);

}  // namespace paceline::bindings
