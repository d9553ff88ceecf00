"""One turn of a conversation, whatever dialect it came in: prompt, parameters, grammar and parser.

Chat completions, Responses, Messages and the ZMQ door all translate into a `Turn`; `plan_turn` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from runtime.errors import InvalidRequest
from runtime.messages import GrammarSpec, Hints, Submit, pack_ids
from runtime.params import SamplingParams
from runtime.serve.call_grammar import auto_grammar, auto_parser
from runtime.serve.call_ids import canonical_calls
from runtime.serve.context import Caller, Serving
from runtime.serve.sampling import spaced
from runtime.serve.tools import NO_TOOLS, Tool, ToolChoice, check_tools, required_grammar
from runtime.text.messages import Message, normalise_messages
from runtime.text.parsers.base import FirstCallOnly, Parser, PlainParser
from runtime.text.parsers.forced import ForcedArguments, ForcedCalls
from runtime.text.parsers.reasoning import ReasoningParser, Start, start_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a client asked for. `answer`: the grammar of a plain answer; `messages` are as they came.

    `whitespace`: of the grammar that the turn gets, the answer's or that of calls.
    """

    messages: Any
    params: SamplingParams
    caller: Caller
    tools: Sequence[Tool] = ()
    choice: ToolChoice = NO_TOOLS
    parallel: bool = True
    answer: GrammarSpec | None = None
    whitespace: Literal["fixed", "flexible"] | None = None
    template_args: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    salt: str | None = None
    priority: int = 0
    hints: Hints = field(default_factory=Hints)
    timeout_s: float | None = None
    rid: str | None = None  # the client's own id, to cancel by
    stream: bool = True  # somebody reads along


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """Ready to submit. `new_parser` makes the reader of one answer; `name` is the client's id for it."""

    submit: Submit
    prompt: str
    prompt_ids: tuple[int, ...]
    new_parser: Callable[[], Parser]
    name: str | None
    native_calls: bool  # calls come in the model's own notation, so their text can be put back later
    start: Start  # how the answer begins, where the model thinks


def plan_turn(serving: Serving, turn: Turn) -> PlannedTurn:
    """Render, tokenise and constrain a turn. Raises InvalidRequest naming what cannot be done."""
    text, ids = render_turn(serving, turn)
    params, grammar = turn.params, spaced(_grammar(serving, turn), turn.whitespace)
    uses_tools = turn.choice.mode != "none"
    family = serving.tool_family
    if uses_tools and family.special:
        params = replace(params, skip_special_tokens=False)
    if turn.choice.mode == "auto" and turn.answer is None and not turn.parallel and family.end:
        params = replace(params, stop=(*params.stop, family.end), include_stop_str=True)
    start = start_of(text, serving.think) if serving.think else Start.ANSWERING
    if grammar is not None and serving.think is not None:
        if start is Start.UNKNOWN:  # open the block for the model, so that the grammar knows where it ends
            opening = serving.think.open + "\n"
            text, ids, start = text + opening, ids + serving.renderer.encode(opening), Start.THINKING
        if start is Start.THINKING:
            grammar = replace(grammar, after=grammar.after or serving.think.close)
    return PlannedTurn(
        submit=Submit(
            rid=serving.generator.new_rid(),
            tokens=pack_ids(ids),
            params=params,
            grammar=grammar,
            namespace=turn.caller.namespace(turn.salt),
            client=turn.caller.digest,
            group=turn.caller.digest,
            priority=turn.priority,
            hints=turn.hints,
            timeout_s=turn.timeout_s,
            stream=turn.stream,
        ),
        prompt=text,
        prompt_ids=tuple(ids),
        new_parser=_parser_factory(serving, turn, start),
        name=turn.rid,
        native_calls=turn.choice.mode == "auto",
        start=start,
    )


def render_turn(serving: Serving, turn: Turn) -> tuple[str, list[int]]:
    """The prompt's text and ids, with the ids of recent answers kept as they were generated."""
    messages = _with_raw_calls(serving, turn.caller, normalise_messages(turn.messages))
    shown = [tool.for_template() for tool in turn.tools] if turn.choice.mode != "none" else None
    text = serving.renderer.render_text(messages, shown, turn.add_generation_prompt, **turn.template_args)
    return text, serving.history.encode(turn.caller.digest, text, serving.renderer.encode)


def _with_raw_calls(serving: Serving, caller: Caller, messages: list[Message]) -> list[Message]:
    """Assistant turns with calls that this server wrote: their original text in place of the parsed calls."""
    return [_raw(serving, caller, m) if m.get("tool_calls") else m for m in messages]


def _raw(serving: Serving, caller: Caller, message: Message) -> Message:
    calls = message["tool_calls"]
    known = canonical_calls((call["function"]["name"], call["function"]["arguments"]) for call in calls)
    raw = serving.history.raw_calls(caller.digest, calls[0].get("id", ""), [message["content"], *known])
    return message if raw is None else {"role": "assistant", "content": raw}


def _grammar(serving: Serving, turn: Turn) -> GrammarSpec | None:
    check = serving.generator.grammars.check
    answer = turn.answer
    if answer is not None and answer.after is not None and turn.choice.mode != "none":
        raise InvalidRequest("after does not go with tools: a call may stand where the free text would.", param="after")
    match turn.choice.mode:
        case "required" | "named":
            bound = [tool for tool in turn.tools if turn.choice.mode == "required" or tool.name == turn.choice.name]
            check_tools(bound, check)
            return required_grammar(turn.tools, turn.choice, parallel=turn.parallel)
        case "auto":
            grammar = auto_grammar(turn.tools, serving.tool_family, turn.answer, parallel=turn.parallel)
            if grammar is not None:
                check_tools(turn.tools, check)
            return grammar
    return answer


def _parser_factory(serving: Serving, turn: Turn, start: Start) -> Callable[[], Parser]:
    tags, names = serving.think, [tool.name for tool in turn.tools]

    def inner() -> Parser:
        match turn.choice.mode:
            case "named":
                return ForcedArguments(turn.choice.name)
            case "required":
                return ForcedCalls()
            case "auto" if turn.answer is not None:
                return auto_parser(turn.tools, serving.tool_family)
            case "auto":
                parser = serving.tool_family.new(names)
                return parser if turn.parallel else FirstCallOnly(parser)
        return PlainParser()

    if tags is None or start is Start.ANSWERING:
        return inner
    return lambda: ReasoningParser(tags, start, inner())
