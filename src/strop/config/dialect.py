"""The YAML of recipes: YAML 1.2's plain values, so that `1e-6` is a number and `off` is a text.

PyYAML follows YAML 1.1, where `1e-6` is a text, `off` and `no` are false, `1:30` is ninety and `2026-01-01` is a date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml

from strop.errors import ConfigError, UserError

_FLOAT = re.compile(
    r"""^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?
        |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_INT = re.compile(r"^(?:[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$")
_PLAIN = [
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789.")),
    ("tag:yaml.org,2002:merge", re.compile(r"^(?:<<)$"), ["<"]),
]


class _Loader(yaml.SafeLoader):
    """Knows plain values only from the table above, not from YAML 1.1."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or this dialect would take for something else, so that any reader agrees."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        key: list(value) for key, value in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    # Readers turn every line break, written bare or in single quotes, into a newline; escapes keep them.
    style = '"' if any(mark in text for mark in "\n\r\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


for _tag, _pattern, _first in _PLAIN:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Dumper.add_representer(str, _text)
_Dumper.add_representer(tuple, yaml.SafeDumper.represent_list)
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))


@dataclass(frozen=True)
class Document:
    """A YAML text as a value, with the tree that knows the lines. `repeated` holds a problem for each repeated key."""

    value: Any
    node: yaml.Node | None
    repeated: list[UserError]


def read(text: str, *, name: str) -> Document:
    """Read one YAML document.

    Args:
        text: the YAML.
        name: what the text is called in errors, such as the file's name.

    Raises:
        ConfigError: the text is not YAML; line and column are named.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Document(None, None, [])
        repeated = list(_repeated_keys(node, name, set(), []))
        return Document(loader.construct_document(node), node, repeated)
    except yaml.YAMLError as error:
        raise ConfigError([_not_yaml(error, text, name)]) from None
    except (RecursionError, ValueError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError([UserError(f"{name} cannot be read as YAML: {what}", where=name)]) from None


def dump(value: Any) -> str:
    """Write a value as YAML that both this dialect and YAML 1.1 read back as the same value.

    Raises:
        UserError: the value holds something that YAML has no plain form for.
    """
    try:
        return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    except yaml.representer.RepresenterError as error:
        found = error.args[-1]
        raise UserError(
            f"{found!r} ({type(found).__name__}) cannot be written to a recipe",
            mend="use numbers, texts, true/false, lists and mappings",
        ) from None


def line_of(node: yaml.Node | None, path: tuple[str | int, ...]) -> tuple[int, int | None, bool]:
    """Follow a path into a tree as far as it goes.

    Returns:
        How many parts were found; the line of the last one (None when none was); and whether the tree ended in a value
        or a list, which replaces whatever a lower layer had there.
    """
    line = None
    for depth, part in enumerate(path):
        if isinstance(node, yaml.MappingNode):
            # Own keys come after those that `<<` merged in, and win.
            pairs = [pair for pair in node.value if pair[0].value == str(part)]
            if not pairs:
                return depth, line, False
            line, node = pairs[-1][0].start_mark.line + 1, pairs[-1][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            return depth, line, node is not None
    return len(path), line, True


def node_at(node: yaml.Node | None, path: tuple[str | int, ...]) -> yaml.Node | None:
    """The tree at a path of keys; None when there is none."""
    for part in path:
        if not isinstance(node, yaml.MappingNode):
            return None
        # Own keys come after those that `<<` merged in, and win.
        found = [value for key, value in node.value if key.value == str(part)]
        node = found[-1] if found else None
    return node


def _repeated_keys(node: yaml.Node, name: str, done: set[int], open_nodes: list[yaml.Node]) -> Iterator[UserError]:
    if any(node is parent for parent in open_nodes):
        raise ValueError(f"the anchor at line {node.start_mark.line + 1} contains itself")
    if id(node) in done or isinstance(node, yaml.ScalarNode):
        return
    done.add(id(node))
    open_nodes.append(node)
    first: dict[str, int] = {}
    for entry in node.value:
        key, value = entry if isinstance(node, yaml.MappingNode) else (None, entry)
        if key is not None and isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            if key.value in first and key.value != "<<":
                yield UserError(
                    f"the key `{key.value}` is written twice in the same section",
                    where=f"{name}, lines {first[key.value]} and {line}",
                    mend="keep one of the two",
                )
            first[key.value] = line
        yield from _repeated_keys(value, name, done, open_nodes)
    open_nodes.pop()


def _not_yaml(error: yaml.YAMLError, text: str, name: str) -> UserError:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return UserError(f"{name} is not a text file with YAML: {str(error).splitlines()[0]}", where=name)
    problem = " ".join(str(part) for part in (getattr(error, "context", None), getattr(error, "problem", "")) if part)
    lines = text.splitlines()
    here = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in here[: mark.column + 1]:
        mend = "indent with spaces, not with tabs"
    elif "mapping values are not allowed" in problem:
        mend = "put a text that holds `: ` in quotes, or check the indentation"
    elif "single document" in problem:
        mend = "keep one document: remove the second `---`"
    else:
        mend = "check the indentation, brackets and quotes here and in the line before"
    return UserError(
        f"{name} is not valid YAML: {problem}",
        where=f"{name}, line {mark.line + 1}, column {mark.column + 1}",
        mend=mend,
    )
