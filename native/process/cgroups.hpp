// The directories of this process's cgroups, in versions 1 and 2. All code that needs a limit or a cgroup uses this.
#pragma once

#include <string>
#include <vector>

namespace paceline {

struct Cgroups {
    // The directories of this process's cgroup and of its ancestors, from the innermost to the outermost; some may not
    // exist.
    std::vector<std::string> directories;
    // Whether the directories come from the table of mounts. Otherwise they are the usual ones: in a container, the
    // path of its cgroup may be a path of the host, of which only the end, or only the outermost directory, is visible.
    bool is_mounted_so = false;
};

// Returns the cgroup with `controller` or, if that is empty, the cgroup of version 2. `root` is prepended to /proc and
// /sys.
Cgroups cgroups_of_this_process(const std::string& controller, const std::string& root = "");

}  // namespace paceline
