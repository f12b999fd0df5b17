// The extension module paceline._core. Only this folder contains bindings, one file for each component.
#include <system_error>

#include "bindings/bindings.hpp"

namespace {

// Converts a std::system_error (no descriptors or threads left) to an OSError with the same errno. The exception is
// constructed here because its class depends on the errno: up to Python 3.11, `except TimeoutError` does not match an
// exception that was set as an OSError with arguments.
void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
        const nanobind::object raised = nanobind::handle(PyExc_OSError)(error.code().value(), error.what());
        PyErr_SetObject(raised.type().ptr(), raised.ptr());
    }
}

}  // namespace

NB_MODULE(_core, module) {
    nanobind::register_exception_translator(translate);
    module.doc() = "Paceline's native core: links, host collectives, reductions, the store server.";
    nanobind::set_leak_warnings(false);
    paceline::bindings::register_process(module);
    paceline::bindings::register_engine(module);
    paceline::bindings::register_memory(module);
    paceline::bindings::register_updates(module);
    paceline::bindings::register_links(module);
    paceline::bindings::register_prepared_calls(module);
    paceline::bindings::register_fast_path_calls(module);
    paceline::bindings::register_tensors(module);
    paceline::bindings::register_store(module);
    paceline::bindings::register_record(module);
    paceline::bindings::register_tls(module);
    paceline::bindings::register_wire(module);
    paceline::bindings::register_simulation(module);
}
