// Bindings of what the kernel lets this process use, for the launcher and for modules that choose by it.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "bindings/bindings.hpp"
#include "process/cores.hpp"

namespace paceline::bindings {

void register_process(nanobind::module_& module) {
    module.def("usable_cores", [] { return usable_cores().count(); });
    module.def(
        "cpu_quota",
        [](const std::string& root) {
            const Quota quota = cpu_quota(root);
            return std::pair(quota.cores, quota.cgroup);
        },
        nanobind::arg("root") = "");
}

}  // namespace paceline::bindings
