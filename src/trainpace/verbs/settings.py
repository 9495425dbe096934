"""Settings from files beside those of a request: a request that contradicts a file is an error, never a guess."""

from __future__ import annotations

from typing import Any, NamedTuple

from trainpace.errors import Contradiction


class SettingsSource(NamedTuple):
    """What the user's files agree on; None where no file was given."""

    combined: Any

    @classmethod
    def read(cls, paths: tuple[str, ...], command: str | None) -> SettingsSource:
        """Read and cross-check. Raises `Contradiction` with every clash where the files disagree."""
        if not paths and not command:
            return cls(None)
        from trainpace.configs import combine, parse_command, read_configs

        files = [*read_configs(paths), *([parse_command(command)] if command else [])]
        combined = combine(files)
        if combined.clashes:
            raise Contradiction(
                "the files contradict each other: " + " ".join(clash.text for clash in combined.clashes),
                "Make them agree, then ask again.",
            )
        return cls(combined)

    def value(self, name: str) -> Any:
        """A setting's value from the files, or None."""
        setting = None if self.combined is None else self.combined.values.get(name)
        return None if setting is None else setting.value

    def pick(self, name: str, option: Any) -> Any:
        """The option's value, or the files'; both must agree."""
        stated = self.value(name)
        if option is not None and stated is not None and option != stated:
            setting = self.combined.values[name]
            raise Contradiction(
                f"{name} is {option} on the command line and {stated} in {setting.file} ({setting.key}).",
                "Leave the option out, or change the file.",
            )
        return stated if option is None else option

    def world(self, nnodes: int | None, nproc_per_node: int | None) -> tuple[int | None, int | None]:
        """(nodes, processes per node); a file that knows only the total is taken as one node."""
        nodes, processes = self.pick("nnodes", nnodes), self.pick("nproc_per_node", nproc_per_node)
        total = self.value("world_size")
        if total is None:
            return nodes, processes
        if nodes and processes:
            if nodes * processes != total:
                raise Contradiction(f"world size {total} in the files is not {nodes} nodes x {processes} processes.")
            return nodes, processes
        divisor = nodes or processes
        if divisor and total % divisor:
            raise Contradiction(f"world size {total} in the files cannot be split by {divisor}.")
        if processes:
            return total // processes, processes
        return nodes or 1, total // (nodes or 1)

    def as_json(self) -> dict[str, Any]:
        """For the JSON answer: what was read, and what was noticed."""
        if self.combined is None:
            return {}
        import msgspec

        notes = [msgspec.to_builtins(note) for note in self.combined.notes]
        settings = {name: msgspec.to_builtins(s) for name, s in self.combined.values.items()}
        return {"settings": settings, "notes_on_files": notes}
