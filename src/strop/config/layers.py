"""The files of a recipe as layers: those that a file extends come before it, and later layers win over earlier ones.

Mappings are merged key by key; a list or a value replaces what was there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from strop.config import dialect
from strop.config.problems import Path as KeyPath
from strop.config.problems import shown
from strop.errors import ConfigError, UserError
from strop.paths import user_path


class Unread(UserError):
    """A file that could not be read: what the recipe lacks for it is not the user's mistake."""


@dataclass(frozen=True)
class Layer:
    """One file of a recipe, or a mapping given in Python (which has no tree and no lines), or a part of either.

    folder: what files that it extends are relative to.
    """

    name: str
    value: dict[str, Any]
    node: yaml.Node | None = None
    folder: Path = Path()

    def below(self, path: KeyPath) -> Layer | None:
        """The mapping at a path as a layer of its own; None when there is no mapping."""
        value: Any = self.value
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, dict):
            return None
        return Layer(self.name, value, dialect.node_at(self.node, path), self.folder)

    def find(self, path: KeyPath) -> tuple[int, int | None, bool]:
        """How many parts of a path are there, the line of the last, and whether it ended in a value or a list."""
        if self.node is not None:
            return dialect.line_of(self.node, path)
        value: Any = self.value
        for depth, part in enumerate(path):
            entries = entries_of(value)
            if part not in entries:
                return depth, None, not isinstance(value, dict)
            value = entries[part]
        return len(path), None, True


@dataclass
class Layers:
    """What was read so far; overrides win over all layers."""

    layers: list[Layer] = field(default_factory=list)
    overrides: list[tuple[KeyPath, str]] = field(default_factory=list)
    problems: list[UserError] = field(default_factory=list)

    def merged(self) -> Any:
        """All layers as one mapping, without the overrides."""
        found: Any = {}
        for layer in self.layers:
            found = merge(found, layer.value)
        return found

    def stop_if_unread(self) -> None:
        """Raise ConfigError with all problems if a part of the recipe could not be read at all."""
        if any(isinstance(problem, Unread) for problem in self.problems):
            raise ConfigError(self.problems)

    def locate(self, path: KeyPath) -> str:
        """Where a key was written, or the section it is missing from."""
        for written, text in reversed(self.overrides):
            if written == path[: len(written)]:
                return f"command line: {text}"
        best, where = 0, self.layers[-1].name if self.layers else ""
        for layer in reversed(self.layers):
            depth, line, ended = layer.find(path)
            if depth > best:
                best, where = depth, layer.name if line is None else f"{layer.name}, line {line}"
            if ended or depth == len(path):
                break
        if best < len(path):
            for written, text in reversed(self.overrides):
                if path == written[: len(path)]:
                    return f"command line: {text}"
        return where

    def add_file(self, path: Path, chain: list[Path]) -> None:
        """Append a file's layers: those of the files it extends first. chain: the files that led here."""
        try:
            document = dialect.read(_text_of(path), name=str(path))
        except ConfigError as error:
            self.problems += [Unread(each.what, where=each.where, mend=each.mend) for each in error.problems]
            return
        except Unread as error:
            self.problems.append(error)
            return
        self.problems += document.repeated
        if document.value is None:
            mend = "a recipe has at least `model:`, `data:` and `rewards:`"
            self.problems.append(Unread(f"{path} is empty", where=str(path), mend=mend))
        elif not isinstance(document.value, dict):
            what = f"{path} is not a mapping of sections but {shown(document.value)}"
            self.problems.append(Unread(what, where=str(path), mend="begin with lines such as `model:` and `data:`"))
        else:
            self.add(Layer(str(path), document.value, document.node, path.parent), [*chain, path.resolve()])

    def add(self, layer: Layer, chain: list[Path]) -> None:
        """Append a layer, after those of the files that its `extends` names."""
        value = dict(layer.value)
        for parent in self._parents(layer, value.pop("extends", None)):
            near = layer.folder / user_path(parent)
            target, where = near.resolve(), self._where_extended(layer)
            if target in chain:
                circle = " -> ".join(step.name for step in [*chain[chain.index(target) :], target])
                what, mend = f"recipes extend each other in a circle: {circle}", "remove one of the `extends`"
                self.problems.append(Unread(what, where=where, mend=mend))
            elif not target.exists():
                what = f"{Path(layer.name).name} extends {parent}, which does not exist"
                mend = _near_file(target) or f"the path is relative to {layer.folder}"
                self.problems.append(Unread(what, where=where, mend=mend))
            else:
                self.add_file(near, chain)
        self.layers.append(Layer(layer.name, value, layer.node, layer.folder))

    def _parents(self, layer: Layer, extends: Any) -> list[str]:
        parents = [extends] if isinstance(extends, str) else [] if extends is None else extends
        if isinstance(parents, list) and all(isinstance(parent, str) for parent in parents):
            return parents
        what = f"`extends` must be a file name or a list of file names, got {shown(extends)}"
        self.problems.append(Unread(what, where=self._where_extended(layer), mend="write `extends: base.yaml`"))
        return []

    def _where_extended(self, layer: Layer) -> str:
        line = layer.find(("extends",))[1]
        return layer.name if line is None else f"{layer.name}, line {line}"


def merge(low: Any, high: Any) -> Any:
    """One value over another."""
    if not isinstance(low, dict) or not isinstance(high, dict):
        return high
    return {**low, **{key: merge(low[key], value) if key in low else value for key, value in high.items()}}


def entries_of(value: Any) -> dict[str | int, Any]:
    """The entries of a mapping, or of a list by their index; none of anything else."""
    return dict(enumerate(value)) if isinstance(value, list) else value if isinstance(value, dict) else {}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        mend = _near_file(path)
        if "=" in path.name and not mend:
            mend = "the first argument is the recipe's file, overrides follow it"
        raise Unread(f"there is no recipe {path}", where=str(path.absolute()), mend=mend) from None
    except IsADirectoryError:
        mend = "name the `.yaml` file in it" if any(path.glob("*.yaml")) else "name a `.yaml` file"
        raise Unread(f"{path} is a folder, not a recipe", where=str(path.absolute()), mend=mend) from None
    except UnicodeDecodeError as error:
        what = f"{path} is not a text file: byte {error.start} is not UTF-8"
        raise Unread(what, where=str(path), mend="name the recipe's `.yaml` file") from None
    except OSError as error:
        raise Unread(f"{path} cannot be read: {error.strerror}", where=str(path)) from None


def _near_file(path: Path) -> str:
    """A mend that names a recipe with a similar name, beside the path or in `recipes/`."""
    folders = dict.fromkeys([path.parent, Path("recipes")])
    found = {file.stem: file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.y*ml"))}
    close = get_close_matches(path.stem, found, n=1)
    if close:
        return f"did you mean {found[close[0]]}?"
    return f"recipes there are {', '.join(str(file) for file in list(found.values())[:8])}" if found else ""
