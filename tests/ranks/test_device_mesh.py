"""Device meshes on real processes, compared with torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import init_device_mesh as torchs

import paceline as dist


def as_torch_does(rendezvous: str) -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch_dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    names = ("dp", "tp")
    mine, theirs = (make("cpu", (2, 2), mesh_dim_names=names) for make in (dist.init_device_mesh, torchs))

    def compare(own: dist.DeviceMesh, other: object) -> None:
        assert own.mesh.tolist() == other.mesh.tolist()
        assert own.mesh_dim_names == other.mesh_dim_names
        assert (own.ndim, own.shape, own.size()) == (other.ndim, tuple(other.shape), other.size())
        assert own.get_coordinate() == list(other.get_coordinate())
        for number in range(own.ndim):
            assert own.get_local_rank(number) == other.get_local_rank(number)
            group, counterpart = own.get_group(number), other.get_group(number)
            assert dist.get_process_group_ranks(group) == torch_dist.get_process_group_ranks(counterpart)

    compare(mine, theirs)
    for name in names:
        compare(mine[name], theirs[name])
    compare(mine["dp", "tp"], theirs["dp", "tp"])
    flat = mine["dp", "tp"]._flatten("all")
    compare(flat, theirs["dp", "tp"]._flatten("all"))
    assert mine["all"] is flat is mine._flatten("all")
    compare(mine["tp"]._flatten(), theirs["tp"]._flatten())

    total = torch.tensor([10.0**rank])
    dist.all_reduce(total, group=mine.get_group("dp"))
    assert total.item() == {0: 101, 1: 1010, 2: 101, 3: 1010}[rank]
    assert repr(mine["dp"]) == f"DeviceMesh('cpu', {[rank % 2, rank % 2 + 2]}, mesh_dim_names=('dp',))"
    torch_dist.destroy_process_group()


def test_a_mesh_has_the_groups_of_torchs(ranks, tmp_path):
    ranks(4)(as_torch_does, str(tmp_path / "rendezvous"))


def what_is_refused() -> None:
    dist.init_process_group()
    for shape, names, text in (
        ((3,), None, r"the shape \(3,\) has 3 ranks, but there are 2"),
        ((2, 1), ("dp",), "must have 2 different names"),
        ((), None, "the shape"),
    ):
        with pytest.raises(ValueError, match=text):
            dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    with pytest.raises(ValueError, match="the device type is 'tpu'"):
        dist.init_device_mesh("tpu", (2,))
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    for wrong in (lambda: mesh["pp"], lambda: mesh.get_group(2), lambda: mesh.get_group()):
        with pytest.raises(ValueError, match="the dimensions of this mesh are dp, tp"):
            wrong()
    with pytest.raises(ValueError, match="name each dimension once, in this order: dp, tp"):
        mesh["tp", "dp"]
    with pytest.raises(ValueError, match="'dp' is the name of one of the dimensions"):
        mesh._flatten("dp")
    assert mesh.get_group("tp").size() == 1
    if dist.get_rank():
        with pytest.raises(dist.CollectiveMismatchError, match="requested different groups from rank 0"):
            dist.init_device_mesh("cpu", (1, 2))
    else:
        with pytest.raises(dist.CollectiveMismatchError, match="requested different groups from rank 0"):
            dist.init_device_mesh("cpu", (2, 1))


def test_meshes_that_do_not_fit_are_refused(ranks):
    ranks(2)(what_is_refused)
