// Bindings for long-lived memory that the ranks on a host share.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "bindings/bindings.hpp"
#include "bindings/calls.hpp"
#include "host/tensor_regions.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

using Bytes = nb::ndarray<nb::pytorch, std::uint8_t, nb::ndim<1>>;

class SharedMemory {
  public:
    explicit SharedMemory(std::shared_ptr<shm::Segment> segment) : segment_(std::move(segment)) {}

    Bytes tensor(std::size_t offset, std::size_t nbytes) const {
        if (offset > segment_->size() || nbytes > segment_->size() - offset)
            throw nb::value_error("the bytes are not in the shared memory");
        using Owner = std::shared_ptr<shm::Segment>;
        auto owner = std::make_unique<Owner>(segment_);
        const nb::capsule capsule(owner.release(), [](void* held) noexcept { delete static_cast<Owner*>(held); });
        return {segment_->data() + offset, {nbytes}, capsule};
    }

  private:
    std::shared_ptr<shm::Segment> segment_;
};

std::pair<SharedMemory, shm::RegionId> share_memory(shm::HostMesh& mesh, std::size_t nbytes) {
    host::SharedRegion shared = host::share_region(mesh, nbytes);
    if (!shared.segment) throw std::system_error(errno, std::generic_category(), "memfd_create");
    return {SharedMemory(std::move(shared.segment)), shared.id};
}

std::optional<SharedMemory> find_memory(shm::HostMesh& mesh, int owner, shm::RegionId id, std::size_t nbytes,
                                        double timeout_s) {
    if (owner < 0 || owner >= mesh.size()) throw nb::value_error("the owner is not a rank of the mesh");
    const shm::FetchResult found = mesh.fetch(owner, id, deadline_in(timeout_s));
    if (found.error != 0) throw std::system_error(found.error, std::generic_category(), "the memory of another rank");
    if (!found.segment || found.segment->size() < nbytes) return std::nullopt;
    return SharedMemory(found.segment);
}

}  // namespace

void register_memory(nb::module_& module) {
    nb::class_<SharedMemory>(module, "SharedMemory")
        .def("tensor", &SharedMemory::tensor, nb::arg("offset"), nb::arg("nbytes"));
    module.def("share_memory", &share_memory, nb::arg("mesh"), nb::arg("nbytes"),
               nb::call_guard<nb::gil_scoped_release>());
    module.def("find_memory", &find_memory, nb::arg("mesh"), nb::arg("owner"), nb::arg("id"), nb::arg("nbytes"),
               nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>());
    module.def("withdraw_memory", &host::withdraw_region, nb::arg("mesh"), nb::arg("id"),
               nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace paceline::bindings
