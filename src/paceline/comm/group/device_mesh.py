"""`DeviceMesh`: ranks laid out as an array, with process groups along each dimension (data, pipeline, tensor parallel).

It implements the group-related methods of torch's `DeviceMesh` without torch.distributed. Torch's own mesh also works,
with the backend that the plug-in registers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm.group.default import default_group
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.subgroups import new_subgroups_by_enumeration

Dimension = int | str


@dataclass(frozen=True)
class _Array:
    """The layout of a root mesh, shared by all slices of the mesh.

    Attributes:
        ranks: the ranks of the default group.
        groups: this rank's group along each dimension.
        flat: the meshes created by `_flatten`, by name.
    """

    device_type: str
    ranks: torch.Tensor
    names: tuple[str, ...] | None
    groups: tuple[ProcessGroup, ...]
    flat: dict[str, DeviceMesh] = field(default_factory=dict)


class DeviceMesh:
    """An n-dimensional array of ranks, returned by `init_device_mesh` and by slicing a mesh."""

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
        """Returns the number of ranks along a dimension, or of the whole mesh."""
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
            ValueError: there is no such dimension, or it is omitted although there are several.
        """
        return self.get_group(mesh_dim).rank()

    def get_group(self, mesh_dim: Dimension | None = None) -> ProcessGroup:
        """Returns this rank's group along a dimension: the ranks with the same indices in all other dimensions.

        Raises:
            ValueError: there is no such dimension, or it is omitted although there are several.
        """
        return self._array.groups[self._find(mesh_dim, "get_group")]

    def get_all_groups(self) -> list[ProcessGroup]:
        """Returns the groups of all dimensions, in order."""
        return [self._array.groups[d] for d in self._dimensions]

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Returns the slice of the mesh along the named dimensions that contains this rank.

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
        """Returns a one-dimensional mesh of this mesh's ranks; all ranks of the root mesh must call this method.

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
        seen = "no dimension was given" if dimension is None else f"there is no dimension {dimension!r}"
        raise ValueError(f"{call}: {seen}; the dimensions of this mesh are {self._described()}")


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """Lays out the ranks of the default group in row-major order; all ranks call this with the same arguments.

    Args:
        device_type: `cpu` or `cuda`.
        mesh_shape: the number of ranks along each dimension; their product is the world size. Ranks that exchange the
            most data belong in the last dimension, since ranks that are adjacent in it are usually on the same host.
        mesh_dim_names: a name for each dimension.

    Returns:
        The mesh. `mesh["tp"]` is its slice along a dimension, and `mesh.get_group("tp")` that slice's process group.

    Raises:
        ValueError: the product of the shape is not the world size, or the names do not fit the shape.
        CollectiveMismatchError: the ranks passed different arguments.
        RendezvousTimeoutError: a rank did not call this function.

    Example::

        mesh = paceline.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        paceline.all_reduce(tensor, group=mesh.get_group("tp"))
    """
    world, shape = default_group(), tuple(mesh_shape)
    if not shape or min(shape) < 1 or math.prod(shape) != world.size():
        raise ValueError(
            f"init_device_mesh: the shape {shape} has {math.prod(shape)} ranks, but there are {world.size()}; "
            "give numbers whose product is the world size"
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
