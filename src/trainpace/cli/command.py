"""click commands from verbs: the fields of a `Request` and of a `View` become options."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple, get_type_hints

import click

from trainpace import report
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import to_jsonable, write_whole
from trainpace.report import Section, tell
from trainpace.verbs.defaults import ProjectDefaults, defaults_for
from trainpace.verbs.request import (
    NEW_FILE,
    Argument,
    Field,
    Group,
    Misuse,
    Request,
    ResolvedField,
    Unit,
    check_relations,
    fields_of,
)


def _picture(path: str) -> str:
    report.check_suffix(NEW_FILE.parse(path))
    return path


class View(Request):
    """Options for the output of an answer.

    `command_of` checks the relations between options, because some involve the verb's request.
    """

    groups = "Output: json details html figure share write new yes"

    def __post_init__(self) -> None:
        pass

    json: Annotated[bool, Field("Print JSON.")] = False
    details: Annotated[bool, Field("Print everything, not only one screen.")] = False


class SharedView(View):
    share: Annotated[
        str | None,
        Field(
            "Save a page without paths, names or scripts, to give away.",
            NEW_FILE,
            metavar="FILE.html",
        ),
    ] = None


class PicturedView(SharedView):
    html: Annotated[
        str | None, Field("Save a page: one file with charts.", NEW_FILE, metavar="FILE.html")
    ] = None
    figure: Annotated[
        str | None,
        Field(
            "Save the charts as pictures (.png, .svg, .pdf); more than one get their titles as"
            " names.",
            Unit("picture", _picture),
            metavar="FILE",
        ),
    ] = None


class Reply(NamedTuple):
    """Answer of a command.

    Attributes:
        record: The answer as a record, for pages to share.
        sections: The answer for the terminal.
        code: Exit code.
        title: Title of the page.
        data: Makes the JSON values, if they are not those of the record.
        page: Sections of the page, if they are not those of the terminal.
        page_data: Makes the JSON values in the page, if they are not `data`.
    """

    record: Any
    sections: Iterable[Section]
    code: int = 0
    title: str = ""
    data: Callable[[], Any] | None = None
    page: Iterable[Section] | None = None
    page_data: Callable[[], Any] | None = None


def command_of(function: Callable[[Any, Any], Reply | int]) -> click.Command:
    """Make a click command from a function of (request, view).

    The types of the two parameters define the options. The function returns its answer, or the exit
    code if it has printed the answer itself.
    """
    hints = get_type_hints(function)
    kinds: tuple[type[Request], ...] = (hints["request"], hints["view"])
    fields = {name: field for kind in kinds for name, field in fields_of(kind).items()}

    def answered(**values: Any) -> int:
        defaults = ProjectDefaults({})
        try:
            defaults = _project_defaults(fields)
            values |= defaults.values
            _check_required(values)
            check_relations(fields, values.__getitem__)
            request, view = (
                kind(**{name: values[name] for name in fields_of(kind)}) for kind in kinds
            )
            reply = function(request, view)
            return reply if isinstance(reply, int) else give(reply, view)
        except TrainpaceError as error:
            hints = [error.hint]
            if isinstance(error, Misuse):
                hints += [f"{defaults.message}." if defaults.message else ""]
                hints += [f"See {click.get_current_context().command_path} --help."]
            error.message = in_options(error.message, fields)
            error.hint = in_options(" ".join(filter(None, hints)), fields)
            raise

    takes_rest = any(
        isinstance(field.about, Argument) and field.about.rest for field in fields.values()
    )
    return _Command(
        fields,
        function.__name__.strip("_"),
        params=[_parameter(field, fields) for field in fields.values()],
        callback=answered,
        help=function.__doc__,
        context_settings=(
            {"ignore_unknown_options": True, "allow_interspersed_args": False}
            if takes_rest
            else None
        ),
    )


CROWDED = 25
"""Maximum number of options in `--help`. Longer lists show only grouped options there.
"""
MORE, ALL = "More options", "trainpace.help_all"


def _show_all(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[ALL] = True
        click.echo(context.get_help())
        context.exit()


class _Command(click.Command):
    """Command with grouped options. `--help` shows the common ones."""

    def __init__(self, fields: Mapping[str, ResolvedField], name: str, **settings: Any) -> None:
        super().__init__(name, **settings)
        options = [field for field in fields.values() if not isinstance(field.about, Argument)]
        self._fields, self._is_crowded = fields, len(options) > CROWDED

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        if not self._is_crowded:
            return params
        show_all = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help=f"Show all {len(self.params)} options and exit.",
        )
        return [*params, show_all]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {group: [] for group in (*Group, MORE)}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                sections[self._heading(parameter)].append(record)
        if not ctx.meta.get(ALL):
            del sections[MORE]
        for heading in filter(sections.get, sections):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])

    def _heading(self, parameter: click.Parameter) -> str:
        field = self._fields.get(parameter.name or "")
        if field is None:
            return Group.OUTPUT
        return field.group or (MORE if self._is_crowded else Group.OPTIONS)


def _project_defaults(fields: Mapping[str, ResolvedField]) -> ProjectDefaults:
    """Return defaults from the project's file for options that are not on the command line.

    Prints a line about them.
    """
    context = click.get_current_context()
    typed = {
        name: context.params[name]
        for name in fields
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    defaults = defaults_for(context.command_path.split()[1:], fields, typed)
    if defaults.message:
        tell(defaults.message, err=True)
    return defaults


class _Option(click.Option):
    """Option that may get its value from the project's file.

    click therefore does not check if it is missing; `_check_required` does.
    """

    def value_is_missing(self, value: Any) -> bool:
        return False


def _check_required(values: Mapping[str, Any]) -> None:
    context = click.get_current_context()
    for parameter in context.command.params:
        if (
            isinstance(parameter, _Option)
            and parameter.required
            and values[parameter.name or ""] in (None, ())
        ):
            raise click.MissingParameter(ctx=context, param=parameter)


def in_options(text: str, fields: Mapping[str, ResolvedField]) -> str:
    """Replace fields in backquotes by options: `num_gpus` becomes --num-gpus.

    A field of a record, such as `zero_stage`, becomes the option that sets it.
    """
    setters = {name: field for field in fields.values() for name in field.about.sets.split()}

    def shown(match: re.Match[str]) -> str:
        field = fields.get(match[1], setters.get(match[1]))
        if field is None:
            return match[0]
        if isinstance(field.about, Argument):
            return field.about.metavar or field.name.upper()
        return f"--{field.option}"

    return re.sub(r"`(\w+)`", shown, text)


def json_stdout(view: Any) -> int | None:
    """Return the file descriptor for the output of a command that the verb runs.

    It is stderr if our JSON goes to stdout, else None.
    """
    return sys.stderr.fileno() if view.json else None


_PASSWORD = re.compile(r"(://[^/@:]*:)[^/]*@")


def typed_words() -> list[str]:
    """Return the command line with passwords hidden. [] if a program runs the command."""
    typed = click.get_current_context().find_root().obj or []
    return ["trainpace", *(_PASSWORD.sub(r"\1***@", word) for word in typed)] if typed else []


def give(reply: Reply, view: Any) -> int:
    """Print an answer and save its pages and charts, as the view asks. Returns the exit code."""
    data = reply.data or partial(to_jsonable, reply.record)
    sections: Iterable[Section] = ()
    if view.json:
        tell(json.dumps(data(), indent=1, allow_nan=False))
    else:
        sections = [*reply.sections]
        report.show(sections, view.details)
    if share := getattr(view, "share", None):
        verb = (click.get_current_context().info_name or "").capitalize()
        write_whole(share, report.shared_page(reply.record, f"{verb}, to be shared"))
        tell(f"Page to share: {share}", err=True)
    html, figure = getattr(view, "html", None), getattr(view, "figure", None)
    if html or figure:
        page = [*(reply.page or sections or reply.sections)]
        _save_page(html, figure, reply.title, page, reply.page_data or data)
    return reply.code


def _save_page(
    html: str | None, figure: str | None, title: str, page: list[Section], data: Callable[[], Any]
) -> None:
    if html:
        write_whole(html, report.page(title, page, data()))
        tell(f"Page: {html}", err=True)
    for file in report.save_figures(report.pictures_of(page), figure) if figure else ():
        tell(f"Picture: {file}", err=True)


class _Reader(click.ParamType):
    """Type of a parameter whose text is read by its field."""

    _field: ResolvedField

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._field.read_one(value)
        except TrainpaceError as error:
            self.fail(str(error), param, ctx)


class _Value(_Reader):
    def __init__(self, field: ResolvedField) -> None:
        self._field = field
        plain = {int: "integer", float: "float"}.get(field.kind, "text")
        self.name = field.about.unit.name if field.about.unit else plain

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[Any]:
        from trainpace.cli.program import values

        return values(self._field.name, self._field.about.metavar, incomplete)


class _Choice(_Reader, click.Choice):
    def __init__(self, field: ResolvedField) -> None:
        super().__init__(field.choices)
        self._field = field


def _parameter(field: ResolvedField, fields: Mapping[str, ResolvedField]) -> click.Parameter:
    about = field.about
    kind: click.ParamType = _Choice(field) if field.choices else _Value(field)
    more: dict[str, Any] = {"type": kind, "required": field.required, "metavar": about.metavar}
    if isinstance(about, Argument):
        return _argument(field, more)
    names, help_text = [field.name, f"--{field.option}"], in_options(field.help(fields), fields)
    if field.is_flag:
        return click.Option(names, is_flag=True, default=bool(field.default), help=help_text)
    if not field.required:  # A default with a unit is text, and is parsed like any other value.
        more["default"] = (about.unit and field.default_text) or field.default
    if about.alone is not None:
        more |= {"is_flag": False, "flag_value": about.alone}
    more |= {"multiple": field.several, "show_default": bool(field.default_text)}
    return _Option(names, help=help_text, **more)


def _argument(field: ResolvedField, settings: dict[str, Any]) -> click.Argument:
    if field.several:
        settings["nargs"] = -1
        if field.kind is str:
            settings["type"] = click.UNPROCESSED
    elif not field.required:
        settings["default"] = field.default
    return click.Argument([field.name], **settings)
