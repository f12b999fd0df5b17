"""Makes torch.distributed's `shrink_group` return a group of Paceline's as it is.

`shrink_group` asks the backend for a smaller one and registers that with a new process group of PyTorch's own. Only
instances of the C++ class `Backend` can be registered, and a group of Paceline's is a process group itself: where
`init_process_group` returns such a group, `shrink_group` does not know that case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as torch_dist
from torch.distributed import distributed_c10d as c10d

_MAKE = "_create_shrunk_process_group"


def is_possible() -> bool:
    """Returns whether this release of PyTorch has `shrink_group`, made in the way that is known here."""
    return hasattr(c10d, "shrink_group") and hasattr(c10d, _MAKE)


def return_groups_themselves(kind: type[torch_dist.ProcessGroup]) -> None:
    """Has `shrink_group` return groups of the class `kind` themselves; those of others are treated as before."""
    make = getattr(c10d, _MAKE)
    if getattr(make, "kind", None) is kind:
        return

    def make_or_return(new_backend: Any, ranks: Sequence[int], metadata: Any, is_default_group: bool) -> Any:
        if not isinstance(new_backend, kind):
            return make(new_backend, ranks, metadata, is_default_group)
        former = metadata["original_group_name"]
        # PyTorch numbers groups anew after this, and would find keys of earlier groups under the same names.
        metadata["store"] = new_backend.get_group_store()
        new_backend._set_group_name(metadata["new_group_name"])
        new_backend._set_group_desc("default:shrunken" if is_default_group else f"{former}:shrunk")
        return new_backend

    make_or_return.kind = kind  # type: ignore[attr-defined]
    setattr(c10d, _MAKE, make_or_return)
