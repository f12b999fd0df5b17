#include "process/cgroups.hpp"

#include <fstream>
#include <optional>
#include <sstream>

namespace paceline {
namespace {

constexpr const char* kDefaultRoot = "/sys/fs/cgroup";

// A cgroup hierarchy and the path of this process's cgroup in it.
struct Membership {
    bool is_version_2;
    std::string path;  // without a trailing slash, so it is empty for the root
};

bool lists(const std::string& names, const std::string& wanted) {
    std::istringstream each(names);
    for (std::string name; std::getline(each, name, ',');)
        if (name == wanted) return true;
    return false;
}

std::optional<Membership> membership_of(const std::string& controller, const std::string& root) {
    std::ifstream file(root + "/proc/self/cgroup");
    std::optional<Membership> unified;
    for (std::string line; std::getline(file, line);) {
        std::istringstream fields(line);
        std::string number, controllers, path;
        if (!std::getline(fields, number, ':') || !std::getline(fields, controllers, ':') ||
            !std::getline(fields, path))
            continue;
        if (path == "/") path.clear();
        if (!controller.empty() && lists(controllers, controller)) return Membership{false, path};
        if (number == "0" && controllers.empty()) unified = Membership{true, path};
    }
    return unified;
}

// The mount point of the hierarchy, and the path of the cgroup below it.
struct CgroupMount {
    std::string at;
    std::string below;
};

// Returns `path` relative to `top`, or nullopt if it is not below `top`.
std::optional<std::string> below(const std::string& path, const std::string& top) {
    if (top == "/") return path;
    if (path.compare(0, top.size(), top) != 0) return std::nullopt;
    const std::string rest = path.substr(top.size());
    return rest.empty() || rest.front() == '/' ? std::optional(rest) : std::nullopt;
}

std::optional<CgroupMount> mount_of(const Membership& mine, const std::string& controller, const std::string& root) {
    std::ifstream file(root + "/proc/self/mountinfo");
    for (std::string line; std::getline(file, line);) {
        const std::size_t middle = line.find(" - ");
        if (middle == std::string::npos) continue;
        std::istringstream mount(line.substr(0, middle)), system(line.substr(middle + 3));
        std::string number, parent, device, top, place, type, source, options;
        mount >> number >> parent >> device >> top >> place;
        system >> type >> source >> options;
        if (mine.is_version_2 ? type != "cgroup2" : type != "cgroup" || !lists(options, controller)) continue;
        if (const auto rest = below(mine.path, top)) return CgroupMount{root + place, *rest};
    }
    return std::nullopt;
}

}  // namespace

Cgroups cgroups_of_this_process(const std::string& controller, const std::string& root) {
    Cgroups found;
    const std::optional<Membership> mine = membership_of(controller, root);
    if (!mine) return found;
    const std::optional<CgroupMount> mounted = mount_of(*mine, controller, root);
    found.is_from_mount_table = mounted.has_value();
    const std::string usual = root + kDefaultRoot + (mine->is_version_2 ? "" : "/" + controller);
    const std::string base = mounted ? mounted->at : usual;
    for (std::string path = mounted ? mounted->below : mine->path;; path.erase(path.rfind('/'))) {
        found.directories.push_back(base + path);
        if (path.find('/') == std::string::npos) return found;
    }
}

}  // namespace paceline
