"""Work of the host alone: metadata calls, and modules entered."""

from trainpace.kinds.kind import Kind

KINDS = (Kind("view"), Kind("module"))
