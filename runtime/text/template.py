"""Chat templates: a sandboxed Jinja environment with the helpers that models' templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import InvalidRequest, ModelLoadError


class TemplateRefusal(InvalidRequest):
    """The template called `raise_exception`, or could not render these messages."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages", code="chat_template_error")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here it only renders."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `names` are the variables it reads, so callers know whether it takes tools."""

    def __init__(self, source: str) -> None:
        env = _environment()
        try:
            self.names = jinja2.meta.find_undeclared_variables(env.parse(source))
            self._template = env.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"The chat template does not compile: {error}") from error
        self.source = source

    @property
    def knows_tools(self) -> bool:
        return "tools" in self.names

    def render(self, /, **variables: Any) -> str:
        """Raises TemplateRefusal with the template's own message."""
        try:
            return self._template.render(variables)
        except TemplateRefusal:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
            raise TemplateRefusal(f"The model's chat template cannot render these messages: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _refuse, "strftime_now": _strftime_now}
    env.globals.update(helpers)
    return env


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes: the model must read what the tool's author wrote."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
