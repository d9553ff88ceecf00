"""From a request's GrammarSpec to the text one backend compiles, or a refusal. No backend is needed for this."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from runtime.errors import InvalidRequest, RametError
from runtime.grammar import tags
from runtime.grammar.backends import BackendName, TextKind
from runtime.grammar.distance import forces_little
from runtime.grammar.emit import schema_grammar
from runtime.grammar.limits import Limits, reject
from runtime.grammar.printers import CannotPrint, to_ebnf, to_lark
from runtime.grammar.regex import RegexError, parse_full
from runtime.grammar.regular import NOTHING, Regex, counted_depth, nested_repeat, size
from runtime.grammar.rules import ROOT, Grammar, Leaf, Text, choice, leaves
from runtime.grammar.work import OutOfTime, TooMuchWork, bounded_work
from runtime.messages import GrammarSpec

_LOG = logging.getLogger(__name__)
Choice = Literal["auto", "xgrammar", "llguidance"]
_CHEAP_TEXT = 8 * 1024
_CHEAP_TAGS = 64 * 1024
_LARGE_TEXT = 24 * 1024
_CHEAP_LEAF = 400


@dataclass(frozen=True, slots=True)
class Prepared:
    """What to compile and with which backend. `cheap`: known to compile and match fast, so it skips the gate.
    `grammar`: what the text says, where it is ours. `forces_little`: no text it forces is long."""

    backend: BackendName
    kind: TextKind
    text: str
    cheap: bool
    grammar: Grammar | None = None
    forces_little: bool = False


def prepare(spec: GrammarSpec, choice_of: Choice, limits: Limits, seconds: float | None = None) -> Prepared:
    """Check, normalise and print. Raises InvalidRequest naming the place and the backend that cannot, OutOfTime where
    that takes longer than `seconds`.

    A fault of ours is a refusal of this one request too.
    """
    if spec.after is not None and not 0 < len(spec.after.encode(errors="replace")) <= limits.marker_bytes:
        reject(f"The end-of-thinking marker must have 1 to {limits.marker_bytes} bytes.", "after")
    try:
        with bounded_work(seconds=seconds):
            return _prepare(spec, choice_of, limits)
    except TooMuchWork:
        reject(f"{spec.param}: matching its constants against its patterns takes too long.", spec.param)
    except InvalidRequest as error:
        message = str(error).encode(errors="backslashreplace").decode()  # it may quote what no UTF-8 can hold
        raise InvalidRequest(message, param=error.param, code=error.code) from None
    except (RametError, OutOfTime):
        raise
    except Exception as error:
        _LOG.exception("a grammar of kind %s could not be read", spec.kind)
        reject(f"{spec.param}: this grammar cannot be read ({type(error).__name__}).", spec.param)


def _prepare(spec: GrammarSpec, choice_of: Choice, limits: Limits) -> Prepared:
    match spec.kind:
        case "json_schema" | "json_object":
            return _for_backend(_json(spec, limits), choice_of, limits, spec.param)
        case "choices":
            return _for_backend(_choices(spec, limits), choice_of, limits, "choices")
        case "regex":
            return _for_backend(_regex(spec, limits), choice_of, limits, "regex")
        case "ebnf":
            return _ebnf(spec, choice_of, limits)
        case "structural_tag":
            _only_xgrammar(choice_of, "structural_tag")
            document = limits.parse(spec.spec, "structural_tag")
            text, grammars = tags.rewrite(document, spec.whitespace, limits)
            little = grammars is not None and all(map(forces_little, grammars))
            cheap = grammars is not None and little and all(map(_cheap, grammars)) and len(text) <= _CHEAP_TAGS
            return Prepared("xgrammar", "structural_tag", text, cheap, forces_little=little)
        case other:
            raise InvalidRequest(f"unknown grammar kind {str(other)[:40]!r}.", param="grammar")


def _json(spec: GrammarSpec, limits: Limits) -> Grammar:
    schema: Any = {"type": "object"}
    if spec.kind == "json_schema":
        schema = limits.parse(spec.spec, "json_schema")
        if not isinstance(schema, (dict, bool)):
            reject("The JSON schema must be an object or a boolean.", "json_schema")
        limits.check_schema(schema, "json_schema")
    return schema_grammar(schema, spec.whitespace)


def _choices(spec: GrammarSpec, limits: Limits) -> Grammar:
    words = limits.parse(spec.spec, "choices")
    if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
        reject("choices must be a non-empty array of strings.", "choices")
    n_bytes = sum(len(w.encode(errors="replace")) for w in words)
    if len(words) > limits.choices or n_bytes > limits.choices_bytes:
        reject(f"choices: at most {limits.choices} strings of {limits.choices_bytes} bytes in all.", "choices")
    if any("\ud800" <= c <= "\udfff" for w in words for c in w):
        reject("choices must be valid Unicode.", "choices")
    return Grammar({ROOT: choice(Text(w) for w in words)})


def _regex(spec: GrammarSpec, limits: Limits) -> Grammar:
    pattern = spec.spec
    if len(pattern.encode(errors="replace")) > limits.regex_bytes:
        reject(f"regex: longer than {limits.regex_bytes} bytes.", "regex")
    try:
        regex = parse_full(pattern)
    except RecursionError:
        reject("regex: groups nested this deep are not supported.", "regex")
    except RegexError as error:
        reject(f"regex: {str(error)[:300]}.", "regex")
    if regex == NOTHING:
        reject("regex: no text can match it.", "regex")
    return Grammar({ROOT: Leaf(regex, what="this regular expression")})


def _ebnf(spec: GrammarSpec, choice_of: Choice, limits: Limits) -> Prepared:
    _only_xgrammar(choice_of, "ebnf")
    if len(spec.spec.encode(errors="replace")) > limits.ebnf_bytes:
        reject(f"ebnf: longer than {limits.ebnf_bytes} bytes.", "ebnf")
    return Prepared("xgrammar", "ebnf", spec.spec, cheap=False)


def _only_xgrammar(choice_of: Choice, param: str) -> None:
    if choice_of == "llguidance":
        reject(f"{param}: llguidance cannot enforce it; xgrammar can.", param)


def _for_backend(grammar: Grammar, choice_of: Choice, limits: Limits, param: str) -> Prepared:
    """xgrammar where it can write the whole grammar cheaply, else llguidance; what was asked for, if it can."""
    _check_leaves(grammar, limits, param)
    try:
        if choice_of == "xgrammar":
            return _prepared("xgrammar", "ebnf", to_ebnf(grammar, narrow=True), grammar)
        if choice_of == "auto":
            prepared = _ahead_of_time(grammar)
            if prepared is not None:
                return prepared
        text = to_lark(grammar)
        return _prepared("llguidance", "lark", text, grammar, known_cheap=len(text) <= _CHEAP_TEXT)
    except CannotPrint as error:
        other = "llguidance can" if choice_of == "xgrammar" else "no other backend is configured"
        at = f"JSON schema at '{error.where or '/'}'" if param in ("json_schema", "json_object") else param
        reject(f"{at}: {error.what} cannot be enforced by {choice_of}; {other}.", param)


def _prepared(
    backend: BackendName, kind: TextKind, text: str, grammar: Grammar, *, known_cheap: bool = True
) -> Prepared:
    little = forces_little(grammar)
    return Prepared(backend, kind, text, known_cheap and little and _cheap(grammar), grammar, little)


def _ahead_of_time(grammar: Grammar) -> Prepared | None:
    """With xgrammar, unless it cannot write the whole or would compile for long (thousands of enum values)."""
    try:
        text = to_ebnf(grammar)
    except CannotPrint:
        return None
    return _prepared("xgrammar", "ebnf", text, grammar) if len(text) <= _LARGE_TEXT else None


def _check_leaves(grammar: Grammar, limits: Limits, param: str) -> None:
    """Nested counted repeats multiply; a single long one (maxLength) is only a counter."""
    for leaf in {id(leaf): leaf for leaf in leaves(grammar)}.values():
        for regex in (leaf.regex, *leaf.also) if isinstance(leaf, Leaf) else ():
            if counted_depth(regex) > 1 and nested_repeat(regex) > limits.nested_repeat:
                where = f"JSON schema at '{leaf.where}'" if leaf.where else param
                reject(f"{where}: counted repeats multiply to more than {limits.nested_repeat}.", param)


def _cheap(grammar: Grammar) -> bool:
    """No long counters, no big pattern, not many rules: measured to compile in a few milliseconds."""
    found = {id(leaf): leaf for leaf in leaves(grammar)}.values()
    small = all(isinstance(leaf, Leaf) and all(map(_small, (leaf.regex, *leaf.also))) for leaf in found)
    return small and len(grammar.rules) <= _CHEAP_LEAF


def _small(regex: Regex) -> bool:
    """A few states, or one long counter over single characters (a bounded string)."""
    return size(regex) <= _CHEAP_LEAF and (counted_depth(regex) <= 1 or nested_repeat(regex) <= _CHEAP_LEAF)
