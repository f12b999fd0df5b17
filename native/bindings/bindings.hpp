// One registration function for each component; module.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline::bindings {

void register_process(nanobind::module_& module);
void register_engine(nanobind::module_& module);
void register_memory(nanobind::module_& module);
void register_updates(nanobind::module_& module);
void register_links(nanobind::module_& module);
void register_prepared_calls(nanobind::module_& module);
void register_fast_path_calls(nanobind::module_& module);
void register_tensors(nanobind::module_& module);
void register_store(nanobind::module_& module);
void register_record(nanobind::module_& module);
void register_tls(nanobind::module_& module);
void register_wire(nanobind::module_& module);
void register_simulation(nanobind::module_& module);

}  // namespace paceline::bindings
