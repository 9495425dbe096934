"""Operators that move bytes: whatever no other kind names, and the optimizer's updates."""

from trainpace.kinds.kind import Kind

KINDS = (Kind("elementwise", traffic={"elementwise": 0.8}), Kind("optimizer", traffic={"optimizer": 0.8}))
