"""Messages and tools to prompt ids, through the model's own chat template where it has one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import InvalidRequest
from runtime.params import is_text, shown
from runtime.text.messages import Message, merge_consecutive, normalise_messages
from runtime.text.template import ChatTemplate, TemplateRefusal
from runtime.text.tokenizer import Tokenizer

_PLAIN_TEMPLATE = (  # for a base model without a template: readable, and easy to continue
    "{% for message in messages %}{{ message.role.capitalize() }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

_TOOL_PROMPT = """You can call functions to help the user. These are the functions, one JSON object a line:
<tools>
{tools}
</tools>

To call a function, answer with its name and arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>"""


_OURS = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


def template_variables(value: Any, param: str = "chat_template_kwargs") -> dict[str, Any]:
    """Variables of the template's own that a client sets. Raises InvalidRequest for those it may not set."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InvalidRequest(f"{param} must map names to values; got {shown(value)}.", param=param)
    if taken := sorted(_OURS & value.keys()):
        raise InvalidRequest(f"{param} may not set {taken[0]}; the request has a field for it.", param=param)
    return dict(value)


class ChatRenderer:
    """Renders chats for one tokenizer. Thread-safe.

    A template that knows no tools gets a generic description of them in the system message, and past calls
    and results as text in the same notation. A template that refuses turns of one role in a row is tried
    again with those turns joined (`merge=False` leaves the refusal to the caller).
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, *, merge: bool = True) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(template or tokenizer.chat_template or _PLAIN_TEMPLATE)
        named = tokenizer.named_templates.get("tool_use")
        self._tool_template = ChatTemplate(named) if named and template is None else self.template
        self._merge = merge

    @property
    def source(self) -> str:
        """The template's text: the one for tools, where a model has two."""
        return self._tool_template.source

    @property
    def knows_tools(self) -> bool:
        """Whether the model's own template describes tools."""
        return self._tool_template.knows_tools

    def render(
        self, /, messages: Any, tools: Sequence[Any] | None = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Prompt ids of a chat. Raises InvalidRequest, naming the message, for what cannot be rendered."""
        text = self.render_text(messages, tools, add_generation_prompt, **kwargs)
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text: the template writes its own BOS, so none is added."""
        if not is_text(text):
            raise InvalidRequest("messages hold half a surrogate pair, which is no character.", param="messages")
        return self.tokenizer.encode(text, add_special=False)

    def render_text(
        self, /, messages: Any, tools: Sequence[Any] | None = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt as text. `continue_final_message=True` leaves the last assistant message open."""
        plain = normalise_messages(messages)
        resume = bool(kwargs.pop("continue_final_message", False))
        if resume:
            return self._render_open(plain, tools, kwargs)
        return self._render_plain(plain, tools, add_generation_prompt, kwargs)

    def _render_plain(
        self, plain: list[Message], tools: Sequence[Any] | None, generate: bool, kwargs: dict[str, Any]
    ) -> str:
        template = self._tool_template if tools else self.template
        if not template.knows_tools:
            plain = _without_tool_turns(plain)
            if tools:
                plain, tools = _describe_tools(plain, tools), None
        variables = {
            **kwargs,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": generate,
            "bos_token": self.tokenizer.bos_token,
            "eos_token": self.tokenizer.eos_token,
        }
        try:
            return template.render(messages=plain, **variables)
        except TemplateRefusal:
            joined = merge_consecutive(plain)
            if not self._merge or len(joined) == len(plain):
                raise
            return template.render(messages=joined, **variables)

    def _render_open(self, plain: list[Message], tools: Sequence[Any] | None, kwargs: dict[str, Any]) -> str:
        """Cut the rendering right after the last message's text, so that the model goes on with it."""
        last = plain[-1]
        if last["role"] != "assistant" or not last["content"]:
            raise InvalidRequest(
                "continue_final_message needs a last message of the assistant with text.", param="messages"
            )
        text = self._render_plain(plain, tools, False, kwargs)
        content = last["content"].strip()
        at = text.rfind(content)
        if at < 0:
            raise InvalidRequest(
                "The chat template changes the last message, so it cannot be continued.", param="continue_final_message"
            )
        return text[: at + len(content)]


def _describe_tools(messages: list[Message], tools: Sequence[Any]) -> list[Message]:
    """The system message with the tools' description after it."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False, separators=(", ", ": ")) for tool in tools)
    prompt = _TOOL_PROMPT.format(tools=lines)
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{prompt}".strip()}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _without_tool_turns(messages: list[Message]) -> list[Message]:
    """Past calls and results written out as text, for templates that know neither."""
    return [_as_text(message) if message["role"] in ("assistant", "tool") else message for message in messages]


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    blocks = [f"<tool_call>\n{_call_json(call['function'])}\n</tool_call>" for call in calls]
    return {"role": "assistant", "content": "\n".join([*filter(None, [message["content"]]), *blocks])}


def _call_json(function: dict[str, Any]) -> str:
    return json.dumps(
        {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False, separators=(", ", ": ")
    )
