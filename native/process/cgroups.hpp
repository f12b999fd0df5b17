// Finds the directories of this process's cgroups, for cgroup versions 1 and 2. All code that reads limits from cgroups
// uses these directories.
#pragma once

#include <string>
#include <vector>

namespace paceline {

struct Cgroups {
    // The directories of this process's cgroup and of its ancestors, from the innermost to the outermost; some may not
    // exist.
    std::vector<std::string> directories;
    // True if the directories come from the mount table. If false, no mount contains the cgroup, and the directories
    // are below the default mount point. Some may be missing: in a container, the cgroup's path may be a host path,
    // and only its last components or its outermost directory may be visible.
    bool is_from_mount_table = false;
};

// Returns this process's cgroup for `controller`, or the version 2 cgroup if `controller` is empty. `root` is prepended
// to /proc and /sys.
Cgroups cgroups_of_this_process(const std::string& controller, const std::string& root = "");

}  // namespace paceline
