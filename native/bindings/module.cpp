// The extension module paceline._core. Bindings live in this folder and nowhere else; one file a component.
#include "bindings/bindings.hpp"

NB_MODULE(_core, module) {
    module.doc() = "Paceline's native core: links, host collectives, reductions, the store server.";
    nanobind::set_leak_warnings(false);
    paceline::bindings::register_engine(module);
    paceline::bindings::register_links(module);
    paceline::bindings::register_store(module);
}
