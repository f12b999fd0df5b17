// Where this process's cgroups are, in versions 1 and 2. Everything that asks for a limit or a cgroup asks here.
#pragma once

#include <string>
#include <vector>

namespace paceline {

struct Cgroups {
    // Of this process's cgroup and of those around it, from the inner to the outer one; some may not exist.
    std::vector<std::string> directories;
    // Whether the table of mounts says so. Otherwise they are where they usually are: in a container, the path of its
    // cgroup may be one of the host's, of which only the end is visible, or nothing but the outermost directory.
    bool is_mounted_so = false;
};

// The cgroup that has `controller`; with an empty name, the one of version 2. `root` stands before /proc and /sys.
Cgroups cgroups_of_this_process(const std::string& controller, const std::string& root = "");

}  // namespace paceline
