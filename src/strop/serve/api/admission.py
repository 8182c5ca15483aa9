"""Which recipes a service takes, and from whom.

A recipe can name Python code, programs, addresses and files. From an administrator all of that is taken, for whoever
may log in to the machine could do it anyway. From an operator only what is listed here is: every other key that holds
free text has to be left at its default, so that a key which is added later is refused until somebody has thought
about it.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from strop.config import Config, dialect
from strop.config.loading import config_hash, resolved_yaml
from strop.config.pipeline import PipelineConfig
from strop.config.pipeline_loading import load_recipe, resolved_pipeline
from strop.errors import ConfigError, UserError
from strop.serve.api.access import Role
from strop.serve.api.confined import is_below
from strop.serve.api.settings import MAX_RECIPE

MAX_NODES, MAX_DEPTH = 20_000, 40
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Names of jobs, and so of their runs. No dots: a name never looks like a file or a hidden folder."""

OR_FUNCTIONS = {("AlgorithmSettings", "name"), ("WindowSettings", "order"), ("PastSettings", "select")}
"""Keys that take one of a few names, or `module:function`, which is an administrator's to name."""
PYTHON_SOURCES = frozenset(
    f"strop.data.{module}:{function}"
    for module, functions in {
        "arithmetic": ("problems", "pairs", "judged", "worked", "word_problems"),
        "programs": ("problems", "demonstrations"),
    }.items()
    for function in functions
)
"""The functions that an operator's data may come from: they make rows and touch nothing."""

PLAIN: dict[str, frozenset[str]] = {
    "NewModel": frozenset({"characters"}),
    "LoraConfig": frozenset({"targets"}),
    "DataSettings": frozenset({"system_prompt", "prompt_template"}),
    "DataSource": frozenset({"split", "subset", "arguments"}),
    "Columns": frozenset({"prompt", "answer"}),
    "FormatVerifier": frozenset({"tags", "json_schema", "json_tag"}),
    "RegexVerifier": frozenset({"pattern"}),
    "ChoiceVerifier": frozenset({"letters"}),
    "CodeVerifier": frozenset({"tests", "entry_point", "setup", "before"}),
    "ExampleColumns": frozenset(
        {"messages", "chosen", "rejected", "margin", "ranked", "completion", "label", "steps", "labels"}
    ),
    "ToolEnvironment": frozenset({"opening", "closing", "result"}),
    "RolloutSettings": frozenset({"stop"}),
    "EarlyStopSettings": frozenset({"metric"}),
    "BestSettings": frozenset({"metric"}),
    "RolloutColumns": frozenset(
        {"group", "prompt_ids", "completion", "completion_ids", "logprobs", "reward", "status", "temperature"}
    ),
    "RunSettings": frozenset({"name"}),
}
"""Keys with free text, by the class of their section, that lead nowhere: they are matched, shown to the model, or name
columns. The programs of `CodeVerifier` run in the sandbox, which an operator cannot leave out."""
OF_EVERY_VERIFIER = frozenset({"name", "when", "requires"})

MODELS: dict[str, frozenset[str]] = {
    "ModelSettings": frozenset({"path"}),
    "RewardModelVerifier": frozenset({"path"}),
    "TeacherSettings": frozenset({"path"}),
    "CriticSettings": frozenset({"path"}),
    "AlgorithmSettings": frozenset({"teacher"}),
}
FILES: dict[str, frozenset[str]] = {
    "SupervisedSettings": frozenset({"targets"}),
    "RetrievalTool": frozenset({"folder"}),
}
FORBIDDEN: dict[tuple[str, str], object] = {
    ("ModelSettings", "trust_remote_code"): False,
    ("SandboxSettings", "allow_unsandboxed"): False,
    ("SandboxSettings", "backend"): ("auto", "bubblewrap"),
    ("ClusterSettings", "kind"): "local",
}
"""Keys without free text that an operator has to leave as they are, with what is taken."""


@dataclass(frozen=True)
class Admitted:
    """A recipe that is taken, as the run will read it. text: with every default written out."""

    text: str
    name: str | None
    hash: str


class Refused(UserError):
    """A recipe that this caller may not submit."""


def admit(
    text: str,
    overrides: Sequence[str],
    *,
    role: Role,
    name: str | None,
    fallback: str,
    root: Path,
    scratch: Path,
    allowed: Sequence[Path] = (),
    allow_hub: bool = False,
) -> Admitted:
    """Check a recipe.

    Args:
        text: its YAML. role: of who submits it. name: of the run; `run.name` of the recipe when None, else `fallback`.
        root: the folder of the runs, where the run will be. scratch: a file to write the text to; it is left there.
        allowed: folders beside `root` that an operator's recipe may read. allow_hub: whether it may name the Hub.

    Raises:
        UserError: it is no recipe. Refused: this role may not submit it.
    """
    for given, what in [(text, "recipe"), *((one.partition("=")[2], f"override {one[:80]!r}") for one in overrides)]:
        check_size(given, what)
    scratch.write_text(text, encoding="utf-8")
    _refuse_extends(text)
    try:
        settings = load_recipe(scratch, list(overrides))
    except ConfigError as error:
        raise ConfigError([_without_path(problem, scratch) for problem in error.problems]) from None
    recipes = [settings] if isinstance(settings, Config) else list(settings.stages.values())
    guard = Guard(root, tuple(allowed), allow_hub)
    for recipe in recipes:
        folder = recipe.run.folder
        if folder != "runs" and not is_below(Path(root, folder), [root]):
            raise Refused(
                "a run of the service is kept in the folder of the service",
                where=f"run.folder={folder}",
                mend="leave out run.folder",
            )
        if role is not Role.admin:
            guard.check(recipe)
    named = name or (settings.run.name if isinstance(settings, Config) else settings.name) or fallback
    if not NAME.fullmatch(named):
        raise Refused(f"{named!r} is not a name for a run", where="name", mend="letters, digits, _ and -, at most 64")
    placed = _placed(settings, root, named)
    if isinstance(placed, Config):
        return Admitted(resolved_yaml(placed), named, config_hash(placed))
    return Admitted(resolved_pipeline(placed), named, "")


def check_size(text: str, what: str) -> None:
    """Refuse a text whose YAML is too much to look at, before anything is made of it.

    Raises:
        UserError: it is too long, too deep, or becomes too large where its anchors are repeated.
    """
    if len(text.encode(errors="surrogatepass")) > MAX_RECIPE:
        raise UserError(f"the {what} has more than {MAX_RECIPE} bytes", where=what)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        # Events come one after the other; trees are made by functions that call themselves, down to the stack's end.
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _too_deep(what)
        node = yaml.compose(text, Loader=loader)
    except (yaml.YAMLError, ValueError, UnicodeError, RecursionError) as error:
        raise UserError(f"the {what} is not YAML: {str(error).splitlines()[0]}", where=what) from None
    if node is not None and _weight(node, {}, what, 0) > MAX_NODES:
        raise UserError(f"the {what} has more than {MAX_NODES} entries, aliases counted", where=what)


def _weight(node: yaml.Node, known: dict[int, int], what: str, depth: int) -> int:
    """How many entries a tree has when each alias is written out. Each part is looked at once, however often used."""
    if depth > MAX_DEPTH:
        raise _too_deep(what)
    if id(node) not in known:
        below: list[Any] = []
        if isinstance(node, yaml.SequenceNode):
            below = node.value
        elif isinstance(node, yaml.MappingNode):
            below = [one for pair in node.value for one in pair]
        known[id(node)] = 1 + sum(_weight(one, known, what, depth + 1) for one in below)
    return known[id(node)]


def _too_deep(what: str) -> UserError:
    return UserError(f"the {what} is nested more than {MAX_DEPTH} deep, or an alias contains itself", where=what)


@dataclass(frozen=True)
class Guard:
    """What an operator's recipe may name."""

    root: Path
    allowed: tuple[Path, ...]
    allow_hub: bool

    def check(self, recipe: Config) -> None:
        """Raises Refused with all that is refused."""
        problems = list(self._problems(recipe, ""))
        if problems:
            raise _all_of(problems)

    def _problems(self, section: BaseModel, path: str) -> Iterator[UserError]:
        kind = type(section).__name__
        for key, field in type(section).model_fields.items():
            value, where = getattr(section, key), f"{path}{key}"
            taken = FORBIDDEN.get((kind, key), ...)
            if taken is not ... and not (value in taken if isinstance(taken, tuple) else value == taken):
                yield _only_admin(where, value)
            for one, at in _sections(value, where):
                yield from self._problems(one, f"{at}.")
            if not free_text(field.annotation) or value == field.get_default(call_default_factory=True):
                continue
            yield from self._of_text(kind, key, value, where, section)

    def _of_text(self, kind: str, key: str, value: Any, where: str, section: Any) -> Iterator[UserError]:
        if key in PLAIN.get(kind, ()) or (kind.endswith("Verifier") and key in OF_EVERY_VERIFIER):
            return
        rule: Callable[[Any], bool] | None = None
        if key in MODELS.get(kind, ()):
            rule = self._model
        elif key in FILES.get(kind, ()):
            rule = self._file
        elif (kind, key) == ("DataSource", "path"):
            rule = lambda path: self._data(path, section.format)  # noqa: E731
        elif (kind, key) in OR_FUNCTIONS:
            rule = lambda name: ":" not in name  # noqa: E731
        elif (kind, key) == ("RunSettings", "folder"):
            return
        if rule is None or not rule(value):
            yield _only_admin(where, value)

    def _model(self, path: str) -> bool:
        if path.startswith("stage:"):
            return True
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", path) and not (self.root / path).exists():
            # A name of `strop models list`, which is a folder that was fetched by whoever runs the service.
            return True
        return self._file(path) or (self.allow_hub and self._of_hub(path))

    def _data(self, path: str, format: str) -> bool:
        if format == "verifiers" or path.startswith("verifiers:"):
            return False
        if ":" in path:
            return path in PYTHON_SOURCES or (
                re.fullmatch(r"reasoning-gym:[A-Za-z0-9_+]+", path) is not None and format in ("auto", "reasoning_gym")
            )
        return self._file(path) or (self.allow_hub and format in ("auto", "huggingface") and self._of_hub(path))

    def _file(self, path: str) -> bool:
        if path.startswith("~") or "\0" in path:
            return False
        place = self.root / path
        return is_below(place, [self.root, *self.allowed]) and place.exists()

    def _of_hub(self, path: str) -> bool:
        return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) is not None and not (self.root / path).exists()


def free_text(annotation: Any) -> bool:
    """Whether a key may hold any text, in itself, in a list or in a mapping; texts of a fixed choice are not free."""
    if annotation in (str, Any):
        return True
    if hasattr(annotation, "__value__"):
        return free_text(annotation.__value__)
    if typing.get_origin(annotation) is typing.Literal:
        return False
    if typing.get_origin(annotation) is typing.Annotated:
        return free_text(typing.get_args(annotation)[0])
    return any(free_text(part) for part in typing.get_args(annotation))


def _sections(value: Any, path: str) -> Iterator[tuple[BaseModel, str]]:
    if isinstance(value, BaseModel):
        yield value, path
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _sections(one, f"{path}.{index}")
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _sections(one, f"{path}.{name}")


def _placed(settings: Config | PipelineConfig, root: Path, name: str) -> Any:
    """The recipe with its run in the folder of the service, under the name of the job."""

    def placed(recipe: Config, **more: Any) -> Config:
        return recipe.model_copy(update={"run": recipe.run.model_copy(update={"folder": str(root), **more})})

    if isinstance(settings, Config):
        return placed(settings, name=name)
    stages = {stage: placed(recipe) for stage, recipe in settings.stages.items()}
    return settings.model_copy(update={"name": name, "stages": stages})


def _refuse_extends(text: str) -> None:
    value = dialect.read(text, name="recipe").value
    if not isinstance(value, dict):
        return
    sections = {"": value, "defaults": value.get("defaults")}
    stages = value.get("stages")
    sections |= {f"stages.{name}": stage for name, stage in stages.items()} if isinstance(stages, dict) else {}
    for path, section in sections.items():
        if isinstance(section, dict) and "extends" in section:
            where = f"{path}.extends".lstrip(".")
            mend = "send it whole: `strop config show RECIPE` writes a recipe with all that it extends"
            raise Refused("a recipe from outside cannot extend files of the service", where=where, mend=mend)


def _without_path(problem: UserError, scratch: Path) -> UserError:
    texts = (text.replace(str(scratch), "recipe") for text in (problem.what, problem.where, problem.mend))
    what, where, mend = (text.replace(scratch.name, "recipe") for text in texts)
    return UserError(what, where=where, mend=mend)


def _only_admin(where: str, value: Any) -> UserError:
    shown = repr(value)
    return UserError(
        f"only an administrator may set `{where}` to {shown if len(shown) <= 80 else shown[:77] + '...'}",
        where=where,
        mend="leave it out; docs/service.md lists what operators may name",
    )


def _all_of(problems: list[UserError]) -> Refused:
    first = problems[0]
    more = [f"`{problem.where}`" for problem in problems[1:]]
    return Refused(first.what + (f"; nor {', '.join(more)}" if more else ""), where=first.where, mend=first.mend)
