// Bindings for this process's limits (cores, quotas, cgroups), used by the launcher and by modules that depend on these
// limits.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "process/cgroups.hpp"
#include "process/cores.hpp"
#include "process/locality_domain.hpp"

namespace paceline::bindings {

void register_process(nanobind::module_& module) {
    module.def("usable_cores", [] { return usable_cores().count(); });
    module.def(
        "cpu_quota",
        [](const std::string& root) {
            const CpuQuota quota = cpu_quota(root);
            return std::pair(quota.cores, quota.cgroup);
        },
        nanobind::arg("root") = "");
    module.def(
        "cgroups",
        [](const std::string& controller, const std::string& root) {
            Cgroups found = cgroups_of_this_process(controller, root);
            return std::pair(std::move(found.directories), found.is_from_mount_table);
        },
        nanobind::arg("controller"), nanobind::arg("root") = "");
    module.def(
        "domain",
        [](const std::string& root) {
            const LocalityDomain mine = domain_of(usable_cores(), root);
            return std::pair(mine.node, mine.cache);
        },
        nanobind::arg("root") = "");
}

}  // namespace paceline::bindings
