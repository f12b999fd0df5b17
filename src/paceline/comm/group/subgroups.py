"""Functions that divide the ranks in a group into several new groups, and `DeviceMesh`.

A rank outside all new groups receives `GroupMember.NON_GROUP_MEMBER`, on which calls do nothing. torch.distributed
returns None in this case, which later calls would interpret as the default group.
"""

from __future__ import annotations

import math
import os
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm.engine.api import choose
from paceline.comm.group.default import Group, GroupMember, NonMember, default_group, resolve
from paceline.comm.group.engines import agreed_identity
from paceline.comm.group.init import open_group, require_no_options
from paceline.comm.group.process_group import ProcessGroup
from paceline.durations import Timeout
from paceline.errors import CollectiveMismatchError

Subgroups = tuple[ProcessGroup | NonMember, list[ProcessGroup | NonMember]]


def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: None = None,
    group_desc: str | None = None,
) -> Subgroups:
    """Divides the ranks in `group` (default: all) in order into groups of `group_size`; all these ranks must call this.

    Args:
        group_size: the number of ranks in each group. The default is LOCAL_WORLD_SIZE or, if it is not set, the number
            of ranks per machine.
        timeout: the timeout for calls on the new groups; the default group's timeout if None.
        backend: the backend, as in `new_group`.
        pg_options: must be None; no engine has options.
        group_desc: the new groups' name in error messages.

    Returns:
        The new group that contains this rank, and a list of all new groups, in which `GroupMember.NON_GROUP_MEMBER`
        replaces the groups without this rank.

    Raises:
        ValueError: `group_size` does not divide the number of ranks.
        CollectiveMismatchError: the ranks passed different arguments.
        RendezvousTimeoutError: a rank did not call this function.
    """
    parent = resolve(group)
    if parent is None:
        return GroupMember.NON_GROUP_MEMBER, []
    size = _ranks_of_a_machine(parent) if group_size is None else group_size
    if size < 1 or parent.size() % size:
        raise ValueError(
            f"new_subgroups: {parent} has {parent.size()} ranks, which cannot be divided into groups of "
            f"group_size={size}; pass a group_size that divides this number, or use new_subgroups_by_enumeration"
        )
    lists = [list(range(first, first + size)) for first in range(0, parent.size(), size)]
    return _split(parent, lists, "new_subgroups", timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: None = None,
    group_desc: str | None = None,
) -> Subgroups:
    """Creates a group from each list of ranks in the default group; all ranks must call this with the same lists.

    A rank may be in at most one list. See `new_subgroups` for the other arguments and the result.

    Raises:
        ValueError: there are no lists, a list is empty, or a rank does not exist or is in two lists.
        CollectiveMismatchError: the ranks passed different lists.
        RendezvousTimeoutError: a rank did not call this function.
    """
    return _split(
        default_group(),
        ranks_per_subgroup_list,
        "new_subgroups_by_enumeration",
        timeout,
        backend,
        pg_options,
        group_desc,
    )


def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout | None = None,
    pg_options: None = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | NonMember:
    """Creates a group from each list of ranks in `parent_pg`; all ranks in `parent_pg` must call this.

    The default parent is the default group. The lists contain group ranks in the parent. A rank may be in at most one
    list. See `new_subgroups` for the other arguments.

    Returns:
        The new group that contains this rank, or `GroupMember.NON_GROUP_MEMBER`.

    Raises:
        ValueError: there are no lists, a list is empty, or a rank does not exist or is in two lists.
        CollectiveMismatchError: the ranks passed different lists.
        RendezvousTimeoutError: a rank did not call this function.
    """
    parent = resolve(parent_pg)
    if parent is None:
        return GroupMember.NON_GROUP_MEMBER
    return _split(parent, split_ranks or [], "split_group", timeout, backend, pg_options, group_desc)[0]


def _split(
    parent: ProcessGroup,
    lists: Sequence[Sequence[int]],
    call: str,
    timeout: Timeout | None,
    backend: str | None,
    pg_options: None,
    group_desc: str | None,
) -> Subgroups:
    if backend is not None:
        choose(backend)
    require_no_options(pg_options, call)
    divided = [list(ranks) for ranks in lists]
    _require_division(divided, parent.size(), call)
    identity = _agree(parent, divided, call)
    groups: list[ProcessGroup | NonMember] = []
    mine: ProcessGroup | NonMember = GroupMember.NON_GROUP_MEMBER
    for index, ranks in enumerate(divided):
        groups.append(GroupMember.NON_GROUP_MEMBER)
        if parent.rank() in ranks:
            world_ranks = [parent.ranks[rank] for rank in ranks]
            name = f"group of ranks {world_ranks}" if group_desc is None else group_desc
            mine = groups[-1] = open_group(world_ranks, timeout, name, agreed_identity(identity ^ index), backend)
    return mine, groups


def _agree(parent: ProcessGroup, lists: list[list[int]], call: str) -> int:
    """Returns a number, chosen by the parent's first rank, that distinguishes these new groups from all others."""
    mine = torch.tensor([secrets.randbits(61), zlib.crc32(repr(lists).encode())], device="cpu")
    from_all = [torch.empty_like(mine) for _ in parent.ranks]
    parent.all_gather(from_all, mine)
    identity, wanted = from_all[0].tolist()
    others = [parent.ranks[rank] for rank, other in enumerate(from_all) if int(other[1]) != wanted]
    if others:
        raise CollectiveMismatchError(
            f"{parent.me}: {call}: ranks {others} requested different groups from rank {parent.ranks[0]}; this rank "
            f"requested {lists} (ranks of {parent}). Pass the same lists on all ranks. The group remains usable"
        )
    return int(identity)


def _require_division(lists: list[list[int]], size: int, call: str) -> None:
    if not lists:
        raise ValueError(f"{call}: no lists of ranks were passed; pass at least one")
    seen: dict[int, list[int]] = {}
    for ranks in lists:
        if not ranks:
            raise ValueError(f"{call}: a list of ranks is empty; leave it out")
        for rank in ranks:
            if not 0 <= rank < size:
                raise ValueError(f"{call}: rank {rank} of {ranks} does not exist; the group has ranks 0 to {size - 1}")
            if rank in seen:
                raise ValueError(
                    f"{call}: rank {rank} is in {seen[rank]} and in {ranks}; it can be in only one list, once"
                )
            seen[rank] = ranks


def _ranks_of_a_machine(group: ProcessGroup) -> int:
    set_by_launcher = os.environ.get("LOCAL_WORLD_SIZE")
    if set_by_launcher is not None and group is default_group():
        return int(set_by_launcher)
    hosts = [member.host for member in group.members]
    size = hosts.count(hosts[0])
    if any(len(set(hosts[first : first + size])) != 1 for first in range(0, len(hosts), size)):
        raise ValueError(
            f"new_subgroups: the hosts of {group} are {hosts}, which are not {size} consecutive ranks per host; pass "
            "group_size or use new_subgroups_by_enumeration"
        )
    return size


Dimension = int | str


@dataclass(frozen=True)
class _Array:
    """The layout of a root mesh, shared by all slices of the mesh.

    `ranks` are ranks in the default group, `groups` are this rank's groups along each dimension, and `flat` contains
    the meshes created by `_flatten`.
    """

    device_type: str
    ranks: torch.Tensor
    names: tuple[str, ...] | None
    groups: tuple[ProcessGroup, ...]
    flat: dict[str, DeviceMesh] = field(default_factory=dict)


class DeviceMesh:
    """An n-dimensional array of ranks, with process groups along each dimension (data, pipeline, tensor parallel).

    `init_device_mesh` returns a mesh, as does slicing a mesh. The class implements the group-related methods of torch's
    `DeviceMesh` without torch.distributed. Torch's own mesh also works if it uses the backend that the plug-in
    registers.
    """

    def __init__(self, array: _Array, dimensions: Sequence[int]) -> None:
        self._array = array
        self._dimensions = tuple(dimensions)

    @property
    def device_type(self) -> str:
        """The type of the ranks' devices: `cpu` or `cuda`."""
        return self._array.device_type

    @property
    def mesh(self) -> torch.Tensor:
        """The mesh's ranks (in the default group) as an int64 tensor; for a slice, the part that contains this rank."""
        coordinate = [group.rank() for group in self._array.groups]
        index = tuple(
            slice(None) if dimension in self._dimensions else position for dimension, position in enumerate(coordinate)
        )
        return self._array.ranks[index]

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the dimensions, or None."""
        return None if self._array.names is None else tuple(self._array.names[d] for d in self._dimensions)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._dimensions)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each dimension."""
        return tuple(self._array.ranks.shape[d] for d in self._dimensions)

    def size(self, mesh_dim: int | None = None) -> int:
        """Returns the number of ranks along a dimension, or in the whole mesh."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def get_rank(self) -> int:
        """Returns this process's rank in the default group."""
        return default_group().rank()

    def get_coordinate(self) -> list[int]:
        """Returns this rank's index along each dimension of the mesh."""
        return [group.rank() for group in self.get_all_groups()]

    def get_local_rank(self, mesh_dim: Dimension | None = None) -> int:
        """Returns this rank's index along a dimension, which may be omitted for a one-dimensional mesh.

        Raises:
            ValueError: there is no such dimension, or none is given although the mesh has several.
        """
        return self.get_group(mesh_dim).rank()

    def get_group(self, mesh_dim: Dimension | None = None) -> ProcessGroup:
        """Returns this rank's group along a dimension: the ranks with the same indices in all other dimensions.

        Raises:
            ValueError: there is no such dimension, or none is given although the mesh has several.
        """
        return self._array.groups[self._find(mesh_dim, "get_group")]

    def get_all_groups(self) -> list[ProcessGroup]:
        """Returns this rank's groups for all dimensions, in order."""
        return [self._array.groups[d] for d in self._dimensions]

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Returns the slice of the mesh that extends along the named dimensions and contains this rank.

        Raises:
            ValueError: there is no such dimension, or the names are not in the mesh's order.
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if len(names) == 1 and names[0] in self._array.flat:
            return self._array.flat[names[0]]
        dimensions = [self._find(name, "mesh[...]") for name in names]
        if not dimensions or sorted(set(dimensions)) != dimensions:
            raise ValueError(f"mesh[{', '.join(names)}]: name each dimension once, in this order: {self._described()}")
        return DeviceMesh(self._array, dimensions)

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Returns a one-dimensional mesh of this mesh's ranks; all ranks in the root mesh must call this method.

        The root mesh keeps the result and returns it for `mesh[mesh_dim_name]`. The default name consists of the names
        of the dimensions, joined by underscores.

        Raises:
            ValueError: the dimensions have no names, or a dimension of the root mesh already has the name.
        """
        if self._array.names is None or self.mesh_dim_names is None:
            raise ValueError(
                "DeviceMesh: only a mesh whose dimensions have names can be flattened: pass mesh_dim_names"
            )
        name = mesh_dim_name or "_".join(self.mesh_dim_names)
        if self.mesh_dim_names == (name,):
            return self
        if name in self._array.names:
            raise ValueError(
                f"DeviceMesh: {name!r} is the name of one of the dimensions {self._array.names}; choose another"
            )
        if name not in self._array.flat:
            group = _group_along(self._array.ranks, self._dimensions, name)
            flat = _Array(self.device_type, self.mesh.flatten(), (name,), (group,))
            self._array.flat[name] = DeviceMesh(flat, (0,))
        return self._array.flat[name]

    def __repr__(self) -> str:
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}, mesh_dim_names={self.mesh_dim_names})"

    def _described(self) -> str:
        return ", ".join(self.mesh_dim_names) if self.mesh_dim_names else f"{self.ndim} without names"

    def _find(self, dimension: Dimension | None, call: str) -> int:
        """Returns the index of a dimension in the root mesh."""
        names = self.mesh_dim_names or ()
        if dimension is None and self.ndim == 1:
            return self._dimensions[0]
        if isinstance(dimension, str) and dimension in names:
            return self._dimensions[names.index(dimension)]
        if isinstance(dimension, int) and -self.ndim <= dimension < self.ndim:
            return self._dimensions[dimension]
        seen = "no dimension was given" if dimension is None else f"no dimension {dimension!r}"
        raise ValueError(f"{call}: {seen}; the dimensions of this mesh are {self._described()}")


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """Lays out the ranks in the default group in row-major order; all ranks must call this with the same arguments.

    Args:
        device_type: `cpu` or `cuda`.
        mesh_shape: the number of ranks along each dimension; their product is the world size. Ranks that exchange the
            most data should be adjacent in the last dimension, because such ranks are usually on the same host.
        mesh_dim_names: a name for each dimension.

    Returns:
        The mesh. `mesh["tp"]` is its slice along a dimension, and `mesh.get_group("tp")` is the process group of that
        slice.

    Raises:
        ValueError: the product of the shape is not the world size, or the names do not match the shape.
        CollectiveMismatchError: the ranks passed different arguments.
        RendezvousTimeoutError: a rank did not call this function.

    Example::

        mesh = paceline.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        paceline.all_reduce(tensor, group=mesh.get_group("tp"))
    """
    world, shape = default_group(), tuple(mesh_shape)
    if not shape or min(shape) < 1 or math.prod(shape) != world.size():
        raise ValueError(
            f"init_device_mesh: the shape {shape} has {math.prod(shape)} ranks, but there are {world.size()}; pass "
            "numbers whose product is the world size"
        )
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    if names is not None and (len(names) != len(shape) or len(set(names)) != len(names)):
        raise ValueError(
            f"init_device_mesh: mesh_dim_names is {names}; it must have {len(shape)} different names, one for "
            "each dimension"
        )
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"init_device_mesh: the device type is {device_type!r}; it must be 'cpu' or 'cuda'")
    ranks = torch.arange(world.size(), device="cpu").view(shape)
    described = names or tuple(map(str, range(len(shape))))
    groups = tuple(_group_along(ranks, (dimension,), name) for dimension, name in enumerate(described))
    return DeviceMesh(_Array(device_type, ranks, names, groups), range(len(shape)))


def _group_along(ranks: torch.Tensor, dimensions: Sequence[int], name: str) -> ProcessGroup:
    """Creates the groups of ranks whose indices differ only in these dimensions; returns this rank's group."""
    others = [d for d in range(ranks.ndim) if d not in dimensions]
    lists = ranks.permute(*others, *dimensions).reshape(-1, math.prod(ranks.shape[d] for d in dimensions))
    own, _ = new_subgroups_by_enumeration(lists.tolist(), group_desc=f"mesh dimension {name}")
    assert isinstance(own, ProcessGroup), "every rank is in the mesh"
    return own
