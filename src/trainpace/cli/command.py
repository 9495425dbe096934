"""Commands from requests: the options of a verb are the fields of its `Request`, and those of how its answer is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import click

from trainpace.errors import TrainpaceError
from trainpace.verbs.request import Argument, Field, Misuse, Request, ResolvedField, fields_of

if TYPE_CHECKING:
    from trainpace.report import Picture


class View(Request):
    """How an answer is shown."""

    json: Annotated[bool, Field("Print JSON.")] = False


class PicturedView(Request):
    """How an answer is shown that has charts."""

    html: Annotated[str | None, Field("Save the answer as a page: one file, charts included.", metavar="FILE.html")] = (
        None
    )
    figure: Annotated[
        str | None,
        Field("Save the charts as pictures (.png, .svg, .pdf): the first as FILE, others beside it with their title.",
              metavar="FILE"),
    ] = None  # fmt: skip
    json: Annotated[bool, Field("Print JSON.")] = False


R = TypeVar("R", bound=Request)
V = TypeVar("V", bound=Request)
Answer = Callable[[R, V], int]


def command(
    request: type[R], view: type[V], name: str = "", group: click.Group | None = None, **settings: Any
) -> Callable[[Answer[R, V]], click.Command]:
    """Make a command of a function of (request, view) that gives the exit code; its docstring is the help."""

    def made(function: Answer[R, V]) -> click.Command:
        def answered(**values: Any) -> int:
            try:
                return function(_made(request, values), _made(view, values))
            except TrainpaceError as error:
                error.message, error.hint = (in_options(text, request, view) for text in (error.message, error.hint))
                if isinstance(error, Misuse):
                    error.hint = f"{error.hint} See {click.get_current_context().command_path} --help.".strip()
                raise

        parameters = [_parameter(field) for kind in (request, view) for field in fields_of(kind).values()]
        for parameter in parameters:
            if isinstance(parameter, click.Option) and parameter.help:
                parameter.help = in_options(parameter.help, request, view)
        done = click.Command(
            name or function.__name__.strip("_"), params=parameters, callback=answered, help=function.__doc__,
            context_settings=settings,
        )  # fmt: skip
        if group is not None:
            group.add_command(done)
        return done

    return made


def _made(kind: type[Request], values: dict[str, Any]) -> Any:
    return kind(**{name: values[name] for name in fields_of(kind)})


def in_options(text: str, *kinds: type[Request]) -> str:
    """A message whose fields in backquotes are written as options: `num_gpus` as --num-gpus."""
    for name, field in (pair for kind in kinds for pair in fields_of(kind).items()):
        shown = (field.about.metavar or name.upper()) if isinstance(field.about, Argument) else f"--{field.option}"
        text = text.replace(f"`{name}`", shown)
    return text


def json_stdout(view: Any) -> int | None:
    """Where a command that the verb runs may write: not between our own JSON and its reader."""
    return sys.stderr.fileno() if view.json else None


def typed_words() -> list[str]:
    """The command line as it was typed; nothing where a program runs the command."""
    typed = click.get_current_context().find_root().obj
    return ["trainpace", *typed] if typed else []


def echo_json(value: Any) -> None:
    """Print JSON for a program to read."""
    click.echo(json.dumps(value, indent=1, allow_nan=False))


def check_pictures(view: PicturedView) -> None:
    """Before any work: is there a folder to write into, and a kind of picture to write?"""
    from trainpace.verbs.places import check_writable

    for file in (view.html, view.figure):
        if file:
            check_writable(file)
    if view.figure:
        from trainpace.report import check_suffix

        check_suffix(view.figure)


def save_pictures(view: PicturedView, page: Callable[[], str], pictures: Callable[[], Any]) -> None:
    """Save the page and the pictures that were asked for; both are made only then."""
    if view.html:
        from trainpace.records import write_whole

        write_whole(view.html, page())
        click.echo(f"Page: {view.html}", err=True)
    if view.figure:
        from trainpace.report import save_figures

        drawn: list[Picture] = pictures()
        for file in save_figures(drawn, view.figure):
            click.echo(f"Picture: {file}", err=True)


class _Value(click.ParamType):
    """One value of a field."""

    def __init__(self, field: ResolvedField) -> None:
        self._field = field
        plain = {int: "integer", float: "float"}.get(field.kind, "text")
        self.name = field.about.unit.name if field.about.unit else plain

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._field.read_one(value)
        except TrainpaceError as error:
            self.fail(str(error), param, ctx)


class _Choice(click.Choice):
    """One of a field's values, which may be numbers."""

    def __init__(self, field: ResolvedField) -> None:
        super().__init__(field.choices)
        self._field = field

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._field.read_one(super().convert(str(value), param, ctx))


def _parameter(field: ResolvedField) -> click.Parameter:
    about = field.about
    kind: click.ParamType = _Choice(field) if field.choices else _Value(field)
    more: dict[str, Any] = {"type": kind, "required": field.required, "metavar": about.metavar}
    if isinstance(about, Argument):
        if field.several:
            more |= {"nargs": -1, "type": click.UNPROCESSED if field.kind is str else kind}
        elif not field.required:
            more["default"] = field.default
        return click.Argument([field.name], **more)
    names = [field.name, f"--{field.option}"]
    if field.is_flag:
        return click.Option(names, is_flag=True, default=bool(field.default), help=about.help)
    if not field.required:  # a default in a unit is shown as it is written, and read like any other text
        more["default"] = field.default_text if about.unit and field.default_text else field.default
    if about.alone is not None:
        more |= {"is_flag": False, "flag_value": about.alone}
    shown = bool(field.default_text)
    return click.Option(names, multiple=field.several, help=about.help, show_default=shown, **more)
