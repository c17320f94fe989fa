"""A stand-in for a GPU: the meta device, on which tensors have shapes and no values.

A CPU build of PyTorch has no other second device.  What CUDA would refuse, meta lets pass in part (an
index on the CPU, a product with a CPU matrix), so a dispatch mode looks at the devices of every operation.
What code copies to the host is written down.  It comes out as zeros, but numbers of a row fall, so that the
children of a node have different tokens.

    with MetaDevice() as device:
        engine = StageEngine(load_shard(path, 0, 1, "fp16", "meta"))
        ...
    assert device.downloads == [...]
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from microbench.shapes.launches import FREE, WHOLE

aten = torch.ops.aten


class MetaDevice(TorchDispatchMode):
    """Within it, an operation on tensors of the meta device and of the CPU is an AssertionError.

    downloads  shapes of what was copied from the device to the host, in order; () for a number that was
               asked for (``item``, ``bool``): each makes the host wait
    uploads    shapes of what was copied to the device
    launches   operations on the device that would launch a kernel, by name
    """

    def __init__(self) -> None:
        super().__init__()
        self.downloads: list[tuple[int, ...]] = []
        self.uploads: list[tuple[int, ...]] = []
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WHOLE and args[0].is_meta:
            self._check(func, args, kwargs)
            self.launches[func.overloadpacket.__name__] += 1
            return func(*args, **kwargs)
        with self:  # in inference mode what is made of other operations comes here whole
            if (made := func.decompose(*args, **kwargs)) is not NotImplemented:
                return made
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in given}
        if func is aten._local_scalar_dense.default and given[0].is_meta:
            self.downloads.append(())
            return torch.zeros((), dtype=given[0].dtype).item()
        if func is aten._to_copy.default:
            return self._copied(func, given[0], args, kwargs)
        if func is aten.copy_.default and devices == {"cpu", "meta"}:
            target, source = given
            if source.is_meta:
                self.downloads.append(tuple(source.shape))
                return target.copy_(_made_up(target.shape, target.dtype))
            self.uploads.append(tuple(source.shape))
            return target
        self._check(func, args, kwargs)
        if "meta" in devices and (name := func.overloadpacket.__name__) not in FREE:
            self.launches[name] += 1
        return func(*args, **kwargs)

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A number may lie on the CPU anywhere; CUDA's kernels take it as an argument.
        if any(tensor.is_meta for tensor in given) and any(not t.is_meta and t.ndim for t in given):
            shapes = ", ".join(f"{tensor.device.type} {list(tensor.shape)}" for tensor in given)
            raise AssertionError(f"{func} mixes devices: {shapes}")

    def _copied(self, func: Any, source: Tensor, args: Any, kwargs: Any) -> Any:
        device = torch.device(kwargs.get("device") or source.device)
        if source.is_meta and device.type == "cpu":
            self.downloads.append(tuple(source.shape))
            return _made_up(source.shape, kwargs.get("dtype") or source.dtype)
        if device.type == "meta":
            if source.is_meta:
                self.launches["_to_copy"] += 1
            else:
                self.uploads.append(tuple(source.shape))
        return func(*args, **kwargs)


def _made_up(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if len(shape) != 2 or not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.arange(shape[1] - 1, -1, -1).to(dtype).expand(shape).clone()
