"""Executes a tool call: constrained arguments, the function itself, and its result fed back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from frontend_lang.driver import Driver
from frontend_lang.errors import IncompleteValue, ToolFailed
from frontend_lang.ir import Gen, Step, ToolCall
from frontend_lang.outcome import Part
from frontend_lang.record import ToolEvent
from frontend_lang.tools import Tool, ToolResult, call_type, show
from frontend_lang.values import Info, Var

if TYPE_CHECKING:
    from frontend_lang.schema import Typed

MAX_ERROR_CHARS = 400


async def run_tool_call(driver: Driver, step: Step, node: ToolCall) -> None:
    """One turn of a tool. In a chat the call is the assistant's message and the result the tool's."""
    in_chat = bool(driver.roles)
    if in_chat and driver.in_role is None:
        await driver.open_role("assistant")
        driver.in_role = None  # nobody will close it but us
        outer = None
    else:
        outer = driver.in_role
    call, text = await _write_call(driver, step, node, call_type(node))
    result = await _execute(driver, step, node, call)
    if in_chat:
        await driver.close_role()
        await driver.open_role("tool")
        await driver.context.add(result.text, name=node.name)
        await driver.close_role()
        driver.in_role = driver.reopen = outer
    else:
        await driver.context.add(f"{node.before_result}{result.text}{node.after_result}", name=node.name)
    var: Var = step.data
    var.settle(result, Info(text, finish="tool"))


async def _write_call(driver: Driver, step: Step, node: ToolCall, typed: Typed) -> tuple[Any, str]:
    """(tool and arguments, or what was wrong with the text; the text)."""
    gen: Gen[Any] = Gen(node.name, node.params, node.temperature, typed.grammar, typed.parse, kind="tool call")
    inner = Var(node.name, step.where)
    part = Part(Step(gen, step.where, inner))
    driver.begin()
    prompt = await driver.context.commit()
    outer: Var = step.data
    request = driver.request(prompt, driver.params(part), grammar=gen.grammar, returning=True, stream=outer.followed)
    inner.listen(lambda piece: outer.push(piece or ""))
    await driver.receive(request, [part])
    try:
        return await inner.wait(), part.text
    except IncompleteValue as error:
        return error, part.text


async def _execute(driver: Driver, step: Step, node: ToolCall, call: Any) -> ToolResult:
    if isinstance(call, IncompleteValue):
        if node.on_error == "raise":
            raise call
        return _failed(node.tools[0].name, {}, call.message)
    tool, arguments = call
    timeout_s = node.timeout_s if node.timeout_s is not None else tool.timeout_s
    began = driver.run.now()
    try:
        value = await tool.run(arguments, timeout_s)
        text = show(value)
        text.encode()  # a lone surrogate is no text that a model could read
        result = ToolResult(tool.name, arguments, value, None, text)
    except TimeoutError as error:
        result = _problem(step, node, tool, arguments, f"no answer within {timeout_s:g} s", error)
    except Exception as error:  # whatever a user's function raises is the model's to read
        result = _problem(step, node, tool, arguments, f"{type(error).__name__}: {error}", error)
    ended = driver.run.now()
    driver.run.tool_wait_s = ended - began
    driver.run.record.tools.append(
        ToolEvent(
            driver.branch, tool.name, step.where.line, began, ended, show(arguments), result.text[:2000], result.ok
        )
    )
    return result


def _problem(
    step: Step, node: ToolCall, tool: Tool[Any, Any], arguments: dict[str, Any], text: str, error: Exception
) -> ToolResult:
    if node.on_error == "raise":
        raise ToolFailed(f"Tool {tool.name!r} failed: {text}", step.where) from error
    return _failed(tool.name, arguments, text)


def _failed(tool: str, arguments: dict[str, Any], text: str) -> ToolResult:
    text = text.encode("utf-8", "backslashreplace").decode()
    short = text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."
    return ToolResult(tool, arguments, None, short, f"error: {short}")
