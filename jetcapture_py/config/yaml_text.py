"""Find the configuration files of a command line, and read them as plain values with environment variables.

YAML is read by the 1.2 core rules: only `true` and `false` are booleans, `15:00` is text and not a number in base 60,
a date is text. A name given twice in one mapping is an error; tags and merge keys are not part of the format.

Variables are replaced after YAML was parsed and in values only, so no value can add a setting or break a line:

    ${NAME}             the variable, which must be set
    ${NAME:-default}    the default when the variable is unset or empty; it may hold pairs of braces, as in {subject}
    $$                  one dollar sign; a dollar sign before anything but a brace stands for itself

A variable's value is text, and the setting's type interprets it: "5000" is a valid number and "true" a valid boolean,
while a password of digits stays text. An empty unquoted value counts as not set; in quotes it is the empty text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jetcapture_py.config.units import dotted
from jetcapture_py.errors import ConfigError
from jetcapture_py.text import escaped, is_text

MAX_VALUES = 100_000
"""Maximum values, counting every use of an alias: otherwise a few lines could exceed the memory."""
_SUFFIXES = (".yaml", ".yml")
_TAG = "tag:yaml.org,2002:"
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-((?:[^{}]|\{[^{}]*\})*))?\}|(\{))")
_NO_TEXT = "not valid text: it contains a surrogate"
_HARMLESS_QUOTES = re.compile(r"'(?:<[a-z -]+>|[][{},:?-])'")


def expand(path: Path) -> list[Path]:
    """Return a file of the command line, or the files of a directory by name.

    Files directly in a directory count if their names end in .yaml or .yml and do not start with a dot. Raises
    ConfigError for a directory that cannot be read or has none.
    """
    return _files(path) if path.is_dir() else [path]


def _files(directory: Path) -> list[Path]:
    try:
        files = [
            path
            for path in sorted(directory.iterdir())
            if path.suffix in _SUFFIXES and not path.name.startswith(".") and path.is_file()
        ]
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be read: {error.strerror}") from error
    if not files:
        raise ConfigError(f"{directory}: expected files that end in {' or '.join(_SUFFIXES)}, found none")
    return files


class _Loader(yaml.SafeLoader):
    """Reads YAML with the 1.2 core schema's rules for values that are not text."""


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)

_SCALARS: dict[str, Callable[[str], Any]] = {
    _TAG + "null": lambda _: None,
    _TAG + "bool": lambda text: text.lower() == "true",
    _TAG + "int": lambda text: int(text, 0) if text[:2] in ("0o", "0x") else int(text),
    _TAG + "float": float,
}


class _Dumper(yaml.SafeDumper):
    """Writes values that `_Loader` reads back unchanged."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def write(value: object) -> str:
    """Return the text of a value for `read`; text like a variable is escaped."""
    return yaml.dump(_escaped(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _escaped(value: object) -> object:
    if isinstance(value, str):
        return re.sub(r"\$(?=[${])", "$$", value)
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list | tuple) else value


def read(text: str, env: Mapping[str, str] | None) -> object:
    """Parse `text`. Raises ConfigError with every problem of YAML and variables.

    Without `env`, dollar signs are plain text.
    """
    problem = ""
    node: yaml.Node | None = None
    reader = _Reader(env)
    value: object = None
    try:
        node = yaml.compose(text, _Loader)
        value = None if node is None else reader.value(node, ())
    except yaml.YAMLError as error:
        problem = _syntax(error, text)
    except RecursionError:  # or a list or mapping contains itself through an alias
        problem = "the settings are nested too deeply"
    if problem:
        raise ConfigError(problem)
    if reader.problems:
        raise ConfigError(*reader.problems)
    return value


@dataclass(slots=True)
class _Reader:
    env: Mapping[str, str] | None
    problems: list[str] = field(default_factory=list)
    values: int = 0

    def value(self, node: yaml.Node, path: tuple[int | str, ...]) -> object:
        self.values += 1
        if self.values > MAX_VALUES:
            raise ConfigError(f"the settings have more than {MAX_VALUES:,} values, with those of every alias")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self.problems.append(f"{dotted(path)}: YAML tags are not supported (line {_line(node)})")
            return None
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self.mapping(node, path)

    def mapping(self, node: yaml.Node, path: tuple[int | str, ...]) -> dict[str, object]:
        settings: dict[str, object] = {}
        lines: dict[str, int] = {}
        for name, item in node.value:
            if not isinstance(name, yaml.ScalarNode):
                hint = "text that starts with { or [ must be quoted"
                where = f"{dotted(path)}: " if path else ""
                self.problems.append(f"{where}a setting's name must be text (line {_line(name)}); {hint}")
            elif name.value in lines:
                here = dotted((*path, name.value))
                self.problems.append(f"{here}: set twice, on line {lines[name.value]} and on line {_line(name)}")
            elif not is_text(name.value):
                self.problems.append(f"{dotted((*path, name.value))}: {_NO_TEXT} (line {_line(name)})")
            else:
                lines[name.value] = _line(name)
                settings[name.value] = self.value(item, (*path, name.value))
        return settings

    def scalar(self, node: yaml.ScalarNode, path: tuple[int | str, ...]) -> object:
        if node.tag == _TAG + "str":
            text = self.expand(node.value, path)
            if not is_text(text):
                self.problems.append(f"{dotted(path)}: {_NO_TEXT} (line {_line(node)})")
                return ""
            return text if text or node.style is not None else None
        if node.tag not in _SCALARS:
            self.problems.append(
                f"{dotted(path)}: YAML tags are not supported (line {_line(node)}); "
                "text that starts with ! must be quoted"
            )
            return None
        try:
            return _SCALARS[node.tag](node.value)
        except ValueError:
            self.problems.append(f"{dotted(path)}: not a readable number (line {_line(node)})")
            return None

    def expand(self, text: str, path: tuple[int | str, ...]) -> str:
        env = self.env
        if env is None:
            return text

        def one(match: re.Match[str]) -> str:
            dollar, name, default, malformed = match.groups()
            if malformed:
                self.problems.append(f"{dotted(path)}: expected ${{NAME}} or ${{NAME:-default}}; write $$ for a $")
            elif dollar:
                return "$"
            elif default is not None:
                return env.get(name) or str(default)
            elif name not in env:
                hint = f"set it, or write ${{{name}:-default}}"
                self.problems.append(f"{dotted(path)}: the environment variable {name} is not set; {hint}")
            return env.get(name or "", "")

        return _VARIABLE.sub(one, text)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _syntax(error: yaml.YAMLError, text: str) -> str:
    """Describe a syntax error in one line, without quoting the file, which may contain a password."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        position = getattr(error, "position", None)
        before = text[:position] if isinstance(position, int) else ""
        where = f"line {before.count(chr(10)) + 1}: " if before else ""
        return f"{where}not valid YAML: it contains a control character"
    line = text.split("\n")[mark.line] if mark.line < text.count("\n") + 1 else ""
    problem = str(getattr(error, "problem", ""))
    safe = problem if "'" not in _HARMLESS_QUOTES.sub("", problem) and '"' not in problem else "unexpected character"
    return f"line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {escaped(safe)}{_hint(problem, line)}"


def _hint(problem: str, line: str) -> str:
    if "\\t" in problem or line[: len(line) - len(line.lstrip())].count("\t"):
        return "; indent with spaces, not with tabs"
    if "alias" in problem or "cannot start any token" in problem:
        return "; text that starts with a special character must be quoted"
    if "mapping values are not allowed" in problem:
        return '; text that contains ": " must be quoted'
    if "{" in line:
        return "; text with braces must be quoted"
    return ""
