"""Lets torchvision (and so timm) import beside a CPU build of torch: declares the operators that its CUDA wheel lacks.

For tests of model definitions only; torchvision's own operators do not work with it.
"""

import importlib.abc
import importlib.machinery
import sys

_kept = []


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
        return importlib.machinery.PathFinder.find_spec(name, path)


sys.meta_path.insert(0, _DeclareOperators())
