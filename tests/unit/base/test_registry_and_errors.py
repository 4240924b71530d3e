"""Names of built-ins, of plugins and of a user's own code; and the exception tree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

import atoll
from atoll import errors, registry
from atoll.errors import BY_CODE, AtollError, ConfigError, PeerError, StoreError, UpdateRefused, UsageError
from atoll.protocol.messages import Message
from atoll.registry import OwnName, ReceivedName

HERE = re.escape(__file__)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Entry points that other packages would have installed."""
    installed: list[EntryPoint] = []
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [point for point in installed if point.group == group]
    )
    return installed


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models.py").write_text("def build(): return 'built'\n")
    (tmp_path / "my_broken.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("kind", registry.TABLES)
def test_every_built_in_name_loads(kind: str) -> None:
    for name in registry.TABLES[kind]:
        assert registry.load(kind, OwnName(name)) is not None


def test_a_plugin_is_found_by_its_kind(plugins: list[EntryPoint]) -> None:
    """An installed plugin is found under the kind of its entry point group, and under no other kind."""
    plugins.append(EntryPoint("ternary", "math:floor", "atoll.codecs"))
    assert registry.names("codecs") == [*registry.TABLES["codecs"], "ternary"]
    assert registry.load("codecs", OwnName("ternary"))(1.5) == 1
    with pytest.raises(ConfigError, match="'ternary' is not one of the reducers"):
        registry.load("reducers", OwnName("ternary"))


def test_a_plugin_never_shadows_a_built_in_name(plugins: list[EntryPoint]) -> None:
    plugins.append(EntryPoint("sgd", "math:floor", "atoll.outer"))
    assert registry.names("outer").count("sgd") == 1
    assert registry.load("outer", OwnName("sgd")).__name__ == "SGD"


class Mine:
    """Something of this program."""


@pytest.fixture
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.mark.covers("X8")
@pytest.mark.usefixtures("nothing_registered")
@pytest.mark.parametrize("kind", registry.REGISTRABLE)
@pytest.mark.parametrize("name", ["mine", "my.pack-age_1", "my_module:Mine", "mine.py:Mine"])
def test_registered_names_are_found_by_both_classes(kind: str, name: str) -> None:
    """A registered object is found under its name, whether the name comes from the user or over the wire."""
    # By an `OwnName` and by a `ReceivedName`, and only under its kind. A registered name may look like a path. The
    # object is returned, and nothing is imported.
    value = SimpleNamespace(name=name) if kind == "algorithms" else Mine
    atoll.register(kind, name, value)
    assert registry.load(kind, OwnName(name)) is value
    assert registry.resolve_received(kind, ReceivedName(name)) is value
    assert registry.names(kind) == [*registry.TABLES[kind], name]
    assert registry.is_known(kind, name)
    assert registry.package_of(kind, name) == ""
    registry.require_known(kind, "a.setting", OwnName(name))
    others = [each for each in registry.REGISTRABLE if each != kind]
    assert not any(registry.is_known(each, name) for each in others)


@pytest.mark.usefixtures("nothing_registered")
def test_the_last_registered_object_of_a_name_counts(plugins: list[EntryPoint]) -> None:
    """If a program registers two objects under one name, the last one counts, as when a notebook's cell runs again. It
    also precedes a package's entry point.
    """
    plugins.append(EntryPoint("mine", "math:floor", "atoll.codecs"))
    for value in (list, Mine):
        atoll.register("codecs", "mine", value)
    assert registry.resolve_received("codecs", ReceivedName("mine")) is Mine
    assert registry.names("codecs").count("mine") == 1


@pytest.mark.covers("X3")
@pytest.mark.usefixtures("nothing_registered")
@pytest.mark.parametrize(
    ("kind", "name", "value", "words"),
    [
        ("codec", "mine", Mine, "'codec' is not a kind of object.*Did you mean 'codecs'"),
        ("workflows", "mine", Mine, "'workflows' is not a kind of object.*Use one of codecs, filters"),
        ("codecs", "int8", Mine, "'int8' is already one of Atoll's codecs.*Choose another name"),
        ("outer", "sgd", Mine, "'sgd' is already one of Atoll's outer optimizers"),
        ("codecs", "", Mine, "'' cannot be the name"),
        ("codecs", "a\nb", Mine, r"'a\\nb' cannot be the name.*Use 1 to 128 letters"),
        ("codecs", "mine\n", Mine, "cannot be the name"),
        ("codecs", "../mine", Mine, "cannot be the name"),
        ("codecs", "m" * 129, Mine, "cannot be the name"),
        ("codecs", 3, Mine, "name is 3"),
        ("codecs", "mine", "my_module:Mine", "of type str.*the object itself, not its path"),
        ("reducers", "mine", None, "of type NoneType"),
        ("algorithms", "mine", SimpleNamespace(name="other"), "'mine' is not that of the algorithm"),
        ("algorithms", "mine", Mine, "'mine' is not that of the algorithm"),
    ],
)
def test_an_invalid_registration_is_refused(kind: Any, name: Any, value: Any, words: str) -> None:
    """`register` refuses an unknown kind, an invalid or built-in name, and an object that does not fit. Nothing is
    registered.
    """
    with pytest.raises(UsageError, match=words):
        atoll.register(kind, name, value)
    assert registry._registered == {}


@pytest.mark.covers("X8")
@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize("name", ["my_models:build", "my_models.py:build", "subprocess:getoutput", "bf61", "json"])
def test_received_names_are_never_imported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a received name is unknown, it is refused and not imported. The error says how to register or install the
    object.
    """
    sys.modules.pop("my_models", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        registry.resolve_received("codecs", ReceivedName(name))
    assert f"The run's codec {name!r} is neither a part of Atoll nor registered or installed" in caught.value.message
    assert f"call atoll.register('codecs', {name!r}, …) in the script before it joins" in caught.value.remedy
    assert "entry point of the group atoll.codecs" in caught.value.remedy
    assert "my_models" not in sys.modules


def test_received_names_find_known_parts(plugins: list[EntryPoint]) -> None:
    """A received name finds a part of Atoll and the entry point of a package."""
    plugins.append(EntryPoint("ternary", "math:floor", "atoll.codecs"))
    assert registry.resolve_received("codecs", ReceivedName("ternary"))(1.5) == 1
    assert registry.resolve_received("outer", ReceivedName("sgd")).__name__ == "SGD"


@pytest.mark.covers("X8")
@pytest.mark.parametrize(
    "text", ["", "a b", "a\nb", "a\n", "../a", "/a.py:C", "http://h/a", "ä", "-a", "a" * 129, "a\0"]
)
def test_a_received_name_must_be_plain(text: str) -> None:
    """A received name is refused if it is a path or URL, has blanks, or has more than 128 characters."""
    with pytest.raises(ValueError, match="is not a name of the form"):
        ReceivedName(text)
    with pytest.raises(ValidationError):
        Named.model_validate_json(json.dumps({"name": text}))


class Named(Message):
    name: ReceivedName


def test_a_received_name_is_text_in_a_message() -> None:
    named = Named.model_validate_json('{"name": "my_codecs:Coarse"}')
    assert (str(named.name), named.model_dump_json()) == ("my_codecs:Coarse", '{"name":"my_codecs:Coarse"}')
    assert Named.model_json_schema()["properties"]["name"]["type"] == "string"


SNIPPET = """
from atoll import registry
from atoll.registry import OwnName, ReceivedName

received, own = ReceivedName("int8"), OwnName("int8")
registry.load("codecs", received)                       # 6
registry.load("codecs", received.text)                  # 7
registry.load_attribute(received)                       # 8
registry.load_attribute("subprocess:getoutput")         # 9
registry.require_known("codecs", "a.b", received)       # 10
registry.resolve_received("codecs", own)                # 11
received == own                                         # 12
registry.load("codecs", own)
registry.load_attribute(own)
registry.resolve_received("codecs", received)
registry.find("codecs", received)
registry.find("codecs", own)
"""


@pytest.mark.covers("X8")
@pytest.mark.slow
def test_mypy_reports_confused_names(tmp_path: Path) -> None:
    """mypy reports each line of a snippet that confuses a received name, an own name and plain text."""
    # Only own names may be imported. The expected lines have the numbers of the snippet.
    (tmp_path / "snippet.py").write_text(SNIPPET)
    quick = ["--cache-dir=/dev/null", "--follow-imports=silent", "--no-site-packages", "--config-file="]
    source = str(Path(atoll.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *quick, "snippet.py"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.findall(r"^snippet.py:(\d+): error", done.stdout, re.MULTILINE) == [str(line) for line in range(6, 13)]


def test_only_own_names_are_imported() -> None:
    """Plain text and a received name are refused where code is imported by its name. Only an `OwnName` is imported."""
    for call in (lambda: registry.load_attribute("math:floor"), lambda: registry.load("codecs", ReceivedName("int8"))):
        with pytest.raises(UsageError, match="only an OwnName is imported"):
            call()


@pytest.mark.usefixtures("user_module")
def test_an_own_name_loads_user_code() -> None:
    """An `OwnName` with a module and an attribute loads the user's code."""
    assert registry.load("algorithms", OwnName("my_models:build"))() == "built"


@pytest.mark.covers("X3")
@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("target", "message", "remedy"),
    [
        ("my_models", "'my_models' does not name a Python object.", "Use module:attribute"),
        (":build", "':build' does not name a Python object.", "Use module:attribute"),
        ("my_models:", "'my_models:' does not name a Python object.", "Use module:attribute"),
        ("my_modles:build", "no module named 'my_modles'", "Start the command in the folder of the module"),
        ("my_broken:build", "no module named 'surely_not_installed'", "install the package that contains it"),
        ("my_models:biuld", "my_models has no 'biuld'", "Did you mean 'build'?"),
        ("my_models:zzz", "my_models has no 'zzz'", ""),
    ],
)
def test_missing_code_is_reported(target: str, message: str, remedy: str) -> None:
    """If the code of an `OwnName` does not exist, the error says what is missing and how to correct the name."""
    with pytest.raises(ConfigError) as caught:
        registry.load_attribute(OwnName(target))
    assert message in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def build(): pass\nraise ValueError('no licence.')\n", "ValueError: no licence ({file}, line 2)"),
        ("import sys\nsys.exit('too old')\n", "SystemExit: too old ({file}, line 2)"),
        ("import json\n\n\njson.loads('{')\n", "JSONDecodeError: "),
        ("from json import lost\n", "ImportError: cannot import name 'lost' from 'json'"),
        ("def build(:\n", "SyntaxError: invalid syntax ({file}, line 1)"),
    ],
    ids=["raises", "exits", "raises-elsewhere", "lost-name", "syntax"],
)
@pytest.mark.parametrize("form", ["{folder}/their.py:build", "their:build"], ids=["file", "module"])
def test_code_that_fails_at_import_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str, form: str
) -> None:
    """If the user's code raises while it is imported, the error shows the exception and the traceback within that
    code.
    """
    file = tmp_path / "their.py"
    file.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    target = form.replace("{folder}", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        registry.load_attribute(OwnName(target))
    assert f"{target!r} cannot be imported: " in caught.value.message
    assert said.replace("{file}", str(file)) in caught.value.message
    assert str(file) in caught.value.trace
    assert registry.__file__ not in caught.value.trace


def test_errors_of_user_code_are_quoted() -> None:
    """If the user's code raises, the error quotes the exception with its file and line. If the arguments do not fit,
    the error gives the hint about arguments.
    """

    def build() -> object:
        raise OSError("no such site")

    with pytest.raises(ConfigError, match=rf"It cannot be made: OSError: no such site \({HERE}, line \d+\)"):
        registry.construct(build, "It cannot be made", "Give others.")
    with pytest.raises(ConfigError, match=r"It cannot be made: 'n' is an invalid keyword .* Give others\."):
        registry.construct(partial(int, n=1), "It cannot be made", "Give others.")


def test_a_type_error_in_user_code_keeps_its_line() -> None:
    """A `TypeError` in the user's code is reported with its line and traceback. Only a call that does not fit the
    signature gets the hint about arguments.
    """

    def build(width: int) -> object:
        return width + "1"

    with pytest.raises(ConfigError, match=rf"TypeError: unsupported operand .*{HERE}, line \d+\)") as caught:
        registry.construct(partial(build, width=3), "It cannot be made", "Give others.")
    assert "in build" in caught.value.trace
    with pytest.raises(ConfigError, match=r"missing 1 required positional argument: 'width'\. Give others\."):
        registry.construct(build, "It cannot be made", "Give others.")


@pytest.mark.covers("X3")
def test_a_file_named_like_another_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a name finds another module instead of the user's file, the error suggests the path of the file.

    Python imports `site` when it starts, so the user's `site.py` is not found by its module name.
    """
    (tmp_path / "site.py").write_text("def build(): return 'built'\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"the module site is .*site.py, and has no 'build'\. Use site.py:build"):
        registry.load_attribute(OwnName("site:build"))
    assert registry.load_attribute(OwnName("site.py:build"))() == "built"


@pytest.mark.covers("X3")
def test_an_unknown_name_lists_the_known_names(plugins: list[EntryPoint]) -> None:
    """If a name is unknown, the error lists the known names and suggests the nearest one."""
    plugins.append(EntryPoint("ternary", "math:floor", "atoll.codecs"))
    with pytest.raises(ConfigError) as caught:
        registry.load("codecs", OwnName("bf61"))
    assert caught.value.message == f"'bf61' is not one of the codecs: {', '.join(registry.names('codecs'))}."
    assert caught.value.remedy == "Did you mean 'bf16'?"
    with pytest.raises(ConfigError, match="Did you mean 'ternary'"):
        registry.load("codecs", OwnName("ternery"))
    with pytest.raises(ConfigError, match="'sdg' is not one of the outer optimizers: sgd, "):
        registry.load("outer", OwnName("sdg"))


# -- errors


LINE = re.compile(r"^([ │├└─]*)(\w+)(?:  +\S.*)?$")


def drawn_tree() -> dict[str, str]:
    """Class → base, as the docstring of the module draws them: one level is four columns."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = LINE.match(line)
        if match and line.startswith("    "):
            depth = len(match[1]) // 4 - 1
            path[depth:] = [match[2]]
            if depth:
                parents[match[2]] = path[depth - 1]
    return parents


def real_tree(root: type[AtollError] = AtollError) -> dict[str, str]:
    children = root.__subclasses__()
    return {sub.__name__: root.__name__ for sub in children} | {
        name: base for sub in children for name, base in real_tree(sub).items()
    }


def test_the_error_tree_is_documented() -> None:
    """The tree in the docstring of `atoll.errors` shows the real tree of exceptions."""
    assert drawn_tree() == {name: base for name, base in real_tree().items() if hasattr(errors, name)}


def test_every_error_has_its_own_code() -> None:
    """Every exception of Atoll has a wire code of its own, by which it is found."""
    kinds = [AtollError, *(getattr(errors, name) for name in real_tree() if hasattr(errors, name))]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all(BY_CODE[kind.code] is kind for kind in kinds)


def test_exit_codes_mean_failure() -> None:
    """The exit codes of all errors are from 1 to 125, so they mean a failure and no signal."""
    assert all(1 <= kind.exit_code < 126 for kind in BY_CODE.values())


@pytest.mark.covers("X3")
def test_an_error_reads_as_message_and_remedy() -> None:
    """The text of an error is its message and then its remedy, if there is one."""
    error = UpdateRefused("Worker clinic-a: head.weight is not finite.", "Lower the learning rate.")
    assert str(error) == "Worker clinic-a: head.weight is not finite. Lower the learning rate."
    assert (error.message, error.remedy) == (
        "Worker clinic-a: head.weight is not finite.",
        "Lower the learning rate.",
    )
    assert str(PeerError("The server is older.")) == "The server is older."


@pytest.mark.parametrize("cause", ["disk I/O error", "Cannot operate on a closed database."])
def test_a_quoted_cause_has_one_full_stop(cause: str) -> None:
    """If a message quotes a cause that ends with a full stop, the message has only one full stop there."""
    error = StoreError(f"journal.sqlite: {cause}.", "Check the disk.")
    assert str(error) == f"journal.sqlite: {cause.removesuffix('.')}. Check the disk."


def test_a_message_may_end_with_an_ellipsis() -> None:
    assert StoreError("journal.sqlite: and so on...").message == "journal.sqlite: and so on..."


def test_code_is_named_for_messages() -> None:
    """`label_of` returns the name of a class or function; of a partial, that of its function; else that of the class,
    never an address in memory.
    """
    named = [registry.label_of(code) for code in (Path, json.dumps, partial(partial(json.dumps), indent=1), Path("x"))]
    assert named == ["Path", "dumps", "dumps", type(Path()).__qualname__]


def test_each_cause_is_listed_once() -> None:
    """`errors.causes` lists each cause of an error once, even if the causes form a circle."""
    first, second, third = ValueError("first"), OSError("second"), KeyError("third")
    first.__cause__, second.__cause__, third.__cause__ = second, third, second
    assert list(errors.causes(first)) == [first, second, third]
