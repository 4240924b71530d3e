"""Helm's templates, as far as the chart in deploy/helm uses them: for machines without the command `helm`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_WORDS = re.compile(r'"(?:[^"\\]|\\.)*"|[()|]|[^\s()|]+')


def render(chart: Path, values: Mapping[str, Any], name: str = "run") -> list[dict[str, Any]]:
    """The objects that the chart makes with its own values and these in their place."""
    scope = {
        "Values": yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8")) | values,
        "Release": {"Name": name, "Namespace": "lab"},
    }
    defined: dict[str, list[Any]] = {}
    texts = []
    for path in sorted((chart / "templates").iterdir()):
        text = re.sub(r"\{\{/\*.*?\*/\}\}", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        texts.append(_Template(scope, defined).text(_tree(iter(_pieces(text))), scope))
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Each piece, and whether it is an action. A dash trims the white space on its side."""
    at = 0
    for found in re.finditer(r"\{\{(-?)(.*?)(-?)\}\}", text, re.DOTALL):
        before = text[at : found.start()]
        yield (before.rstrip() if found[1] else before), False
        yield found[2].strip(), True
        at = found.end() + (len(text[found.end() :]) - len(text[found.end() :].lstrip()) if found[3] else 0)
    yield text[at:], False


def _tree(pieces: Iterator[tuple[str, bool]]) -> list[Any]:
    """Texts, expressions as ("", expression), and blocks as (kind, expression, tree), up to the end of the block."""
    found: list[Any] = []
    for piece, is_action in pieces:
        kind, _, rest = piece.partition(" ")
        if not is_action:
            found.append(piece)
        elif kind == "end":
            return found
        elif kind in ("define", "if", "range", "with"):
            found.append((kind, rest, _tree(pieces)))
        else:
            found.append(("", piece, []))
    return found


class _Template:
    def __init__(self, root: Mapping[str, Any], defined: dict[str, list[Any]]) -> None:
        self._root, self._defined = root, defined
        self._functions: dict[str, Callable[..., Any]] = {
            "include": lambda name, dot: self.text(self._defined[name], dot),
            "default": lambda other, value=None: value or other,
            "dict": dict,
            "list": lambda *each: list(each),
            "nindent": lambda count, text: "\n" + re.sub(r"^(?=.)", " " * count, text, flags=re.MULTILINE),
            "printf": lambda text, *given: text % given,
            "quote": lambda value: json.dumps(str(value)),
            "toJson": json.dumps,
            "toYaml": lambda value: yaml.safe_dump(value, sort_keys=False).rstrip("\n"),
            "trimSuffix": lambda end, text: text.removesuffix(end),
            "trunc": lambda count, text: text[:count],
        }

    def text(self, tree: list[Any], dot: Any) -> str:
        out = []
        for node in tree:
            if isinstance(node, str):
                out.append(node)
                continue
            kind, expression, body = node
            if kind == "define":
                self._defined[json.loads(expression)] = body
                continue
            value = self._value(_WORDS.findall(expression), dot)
            if kind == "range":
                out += [self.text(body, each) for each in value]
            elif kind:
                out.append(self.text(body, value if kind == "with" else dot) if value else "")
            else:
                out.append("" if value is None else str(value))
        return "".join(out)

    def _value(self, words: list[str], dot: Any) -> Any:
        """The value of a pipeline; uses its words up."""
        arguments: list[Any] = []
        piped: list[Any] = []
        while words:
            word = words.pop(0)
            if word in "|)":
                piped = [self._call(arguments, piped)]
                arguments = []
                if word == ")":
                    return piped[0]
            else:
                arguments.append(self._value(words, dot) if word == "(" else self._word(word, dot))
        return self._call(arguments, piped)

    def _call(self, arguments: list[Any], piped: list[Any]) -> Any:
        first, *rest = arguments
        rest = [each() if callable(each) else each for each in rest]
        return first(*rest, *piped) if callable(first) else first

    def _word(self, word: str, dot: Any) -> Any:
        if word[0] in '"0123456789':
            return json.loads(word)
        if word[0] not in ".$":
            return self._functions[word]
        value = self._root if word[0] == "$" else dot
        for name in filter(None, word.lstrip("$").split(".")):
            value = value.get(name)
        return value
