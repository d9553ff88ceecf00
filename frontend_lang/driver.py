"""Executes one branch's steps, in order, on the event loop. One driver a branch, no thread.

A run of generations with literal text between them is one request (a chain): the runtime appends the text itself.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from frontend_lang.context import Context
from frontend_lang.errors import ProgramError
from frontend_lang.ids import short_id
from frontend_lang.ir import Fork, Gen, Join, Mark, RoleClose, RoleOpen, Select, Step, Text, ToolCall
from frontend_lang.outcome import Part, cut, explain, failure, gather, settle, settle_many, take
from frontend_lang.record import Event, common_prefix
from runtime.errors import RametError
from runtime.messages import Finish, Hints, Segment, Submit, Usage, pack_ids
from runtime.params import SamplingParams
from runtime.validate import MAX_DEPTH, MAX_SEGMENTS

if TYPE_CHECKING:
    from frontend_lang.run import Run


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a branch starts with: its parent at the fork."""

    context: Context
    roles: tuple[str, ...]
    fresh: bool
    in_role: str | None
    reopen: str | None


class Driver:
    """Runs the steps of one branch over its context. Everything here happens on the run's loop."""

    def __init__(self, run: Run, branch: str) -> None:
        self.run = run
        self.branch = branch
        self.run_id = short_id(run.id)
        self.branch_id = self.run_id if branch == "main" else f"{self.run_id}/{short_id(branch)}"
        self.context = Context(run.prepared.codec)
        self.fresh = True  # nothing read yet: raw text starts with the model's bos
        self.roles: tuple[str, ...] = ()
        self.steps: deque[Step] = deque()
        self.start: asyncio.Future[Snapshot] | None = None  # a fork point of the parent
        self.in_role: str | None = None
        self.reopen: str | None = None  # the role a tool's result interrupted
        self._count = 0

    async def drive(self) -> None:
        """Execute until nothing is queued. Raises what failed; queued steps are then left to the state."""
        if self.start is not None:
            there = await self.start
            self.context, self.roles, self.fresh = there.context, there.roles, there.fresh
            self.in_role, self.reopen, self.start = there.in_role, there.reopen, None
        while self.steps:
            step = self.steps[0]
            try:
                await self._execute(step)
            except ProgramError as error:
                if error.where.line:
                    raise
                raise type(error)(error.message, step.where) from error
            except RametError as error:
                raise explain(error, step.where) from error

    async def _execute(self, step: Step) -> None:
        node = step.node
        if self.reopen is not None and isinstance(node, Text | Gen | Select | ToolCall):
            await self.open_role(self.reopen)
        if isinstance(node, Gen):
            await self._chain()
            return
        self.steps.popleft()
        if isinstance(node, Text | RoleOpen | RoleClose):
            await self._literal(step)
        elif isinstance(node, Fork):
            await self.context.settle()
            for name, future in zip(node.names, step.data, strict=True):
                self.run.fork_spans[name] = len(self.context.spans)
                if not future.done():
                    future.set_result(Snapshot(self.context.fork(), self.roles, self.fresh, self.in_role, self.reopen))
        elif isinstance(node, Mark):
            for future in step.data:
                if not future.done():
                    future.set_result(tuple(self.context.spans))
        elif isinstance(node, Join):
            await self._join(step, node)
        elif isinstance(node, Select):
            from frontend_lang.choose import run_select

            await run_select(self, step, node)
        elif isinstance(node, ToolCall):
            from frontend_lang.use import run_tool_call

            await run_tool_call(self, step, node)

    # ---- literal text -------------------------------------------------------------------------------------

    async def _literal(self, step: Step) -> None:
        node = step.node
        if isinstance(node, Text):
            if node.text:
                self.begin()
            await self.context.add(node.text, special=node.special)
        elif isinstance(node, RoleOpen):
            await self.open_role(node.role)
        elif isinstance(node, RoleClose):
            await self.close_role()

    async def open_role(self, role: str) -> None:
        self.roles = (*self.roles, role)
        self.in_role, self.reopen = role, None
        self.fresh = False  # the template brings its own bos
        await self.context.add(await self.run.prepared.pieces.open(self.roles), special=True)

    async def close_role(self) -> None:
        if self.reopen is None:  # else the tool's result closed it
            await self.context.add(await self.run.prepared.pieces.close(self.roles), special=True)
        self.in_role = self.reopen = None

    def begin(self) -> None:
        """Something is about to be generated: a prompt of raw text starts with the model's bos."""
        if self.fresh:
            self.context.begin(self.run.prepared.backend.bos_ids)
            self.fresh = False

    async def _join(self, step: Step, node: Join) -> None:
        stories = [await future for future in step.data]
        for index, spans in enumerate(stories):
            if index and node.sep:
                await self.context.add(node.sep)
            await self.context.splice(spans)

    # ---- generations --------------------------------------------------------------------------------------

    async def _chain(self) -> None:
        """Send the longest chain at the head of the queue and take in what comes."""
        parts = self._take_chain()
        if parts[0].gen.n > 1:
            await self._many(parts[0])
            return
        self.begin()
        prompt = await self.context.commit()
        segments = []
        shadow = Driver(self.run, self.branch)
        shadow.roles, shadow.fresh = self.roles, False
        for part in parts[1:]:  # the text between is tokenised by itself: a generation is a border
            shadow.context = Context(self.run.prepared.codec)
            for step in part.before:
                await shadow._literal(step)
            tokens = await shadow.context.commit()
            segments.append(Segment(tokens=pack_ids(tokens), params=self.params(part), grammar=part.gen.grammar))
        request = self.request(
            prompt,
            self.params(parts[0]),
            grammar=parts[0].gen.grammar,
            segments=tuple(segments),
            timeout_s=parts[0].gen.deadline,
            stream=any(part.step.data.followed for part in parts),
        )
        await self.receive(request, parts)

    def _take_chain(self) -> list[Part]:
        """Pop the generation at the head and those that literal text alone separates from it, as many as one request
        may have."""
        parts = [Part(self.steps.popleft())]
        first = parts[0].gen
        if first.n > 1 or not self.run.prepared.backend.able.segments or first.deadline is not None:
            return parts
        while len(parts) <= MAX_SEGMENTS:
            n_text = 0
            while n_text < len(self.steps) and isinstance(self.steps[n_text].node, Text | RoleOpen | RoleClose):
                n_text += 1
            if n_text == len(self.steps):
                return parts
            node = self.steps[n_text].node
            if not isinstance(node, Gen) or node.n > 1 or node.deadline is not None or n_text == 0:
                return parts
            before = [self.steps.popleft() for _ in range(n_text)]
            parts.append(Part(self.steps.popleft(), before))
        return parts

    async def receive(self, request: Submit, parts: list[Part]) -> None:
        """Follow the request's stream; every finished part becomes committed ids and a value."""
        began = self.run.now()
        usage, at = None, 0
        try:
            async with aclosing(cast(Any, await self.run.batcher.submit(request))) as stream:
                async for piece in stream:
                    usage = piece.usage or usage
                    if piece.finish is not None and piece.finish.reason in ("error", "abort"):
                        raise failure(piece.finish, parts[at].step.where)
                    part = parts[piece.segment]
                    take(part, piece)
                    if piece.finish is not None:
                        part.finish = piece.finish
                        await self._finish_part(part, usage)
                        at = piece.segment + 1
        except BaseException as error:
            self._requeue(parts[at:])
            if at:  # what was made before stays, and so does what it cost
                self._note(request, parts[:at], began, usage)
            if isinstance(error, RametError) and not isinstance(error, ProgramError):
                raise explain(error, parts[min(at, len(parts) - 1)].step.where) from error
            raise
        self._note(request, parts[:at], began, usage)
        self._requeue(parts[at:])  # the runtime stopped early (a stop string inside a token): send the rest anew

    def _requeue(self, parts: Sequence[Part]) -> None:
        """Put parts that did not run back at the head of the queue."""
        for part in reversed(parts):
            self.steps.appendleft(part.step)
            self.steps.extendleft(reversed(part.before))

    async def _finish_part(self, part: Part, usage: Usage | None) -> None:
        if part.before:
            for step in part.before:
                await self._literal(step)
            await self.context.commit()
        kept, rest = self.kept_ids(part.ids, part.finish)
        self._extend(part, kept, rest)
        if rest:
            await self.context.add(rest)
        settle(part, usage)

    def _extend(self, part: Part, kept: Sequence[int], rest: str) -> None:
        """Append what was generated; `rest` is the text of a token that does not stay."""
        text = part.text[: len(part.text) - len(rest)]
        self.context.extend(kept, text, name=part.gen.name, forced=part.forced)

    def kept_ids(self, ids: Sequence[int], finish: Finish | None) -> tuple[list[int], str]:
        """(ids that stay in the context, text of a token cut by a stop string).

        The stop itself never stays: the program's own text comes next. A stop string that begins inside a token
        takes the token with it, and what stood before it in the token stays as open text.
        """
        kept = list(ids)
        backend = self.run.prepared.backend
        if finish is None or finish.reason != "stop":
            return kept, ""
        if isinstance(finish.matched, str):
            stop = finish.matched.encode()
            hidden = set(backend.specials.values())  # stops are matched on what is shown
            bytes_of = [b"" if token in hidden else backend.token_bytes(token) for token in kept]
            at = b"".join(bytes_of).find(stop)
            return cut(kept, bytes_of, at) if at >= 0 else (kept, "")
        if kept and (kept[-1] == finish.matched or kept[-1] in backend.stop_ids):
            kept.pop()
        return kept, ""

    async def _many(self, part: Part) -> None:
        """n samples of one prompt; the branch goes on with the first."""
        self.begin()
        prompt = await self.context.commit()
        gen, began = part.gen, self.run.now()
        copies = [Part(part.step) for _ in range(gen.n)]
        requests = [
            self.request(
                prompt,
                self.params(copy, index),
                leaf=index > 0,
                grammar=gen.grammar,
                timeout_s=gen.deadline,
                stream=index == 0 and part.step.data.followed,
            )
            for index, copy in enumerate(copies)
        ]
        try:
            usages = await gather(
                *(self.collect(r, c, push=c is copies[0]) for r, c in zip(requests, copies, strict=True))
            )
        except BaseException:
            self.steps.appendleft(part.step)
            raise
        for request, copy, usage in zip(requests, copies, usages, strict=True):
            self._note(request, [copy], began, usage)
        kept, rest = self.kept_ids(copies[0].ids, copies[0].finish)
        self._extend(copies[0], kept, rest)
        await self.context.add(rest)
        settle_many(part.step, copies, usages[0])

    async def collect(self, request: Submit, part: Part, *, push: bool) -> Usage:
        """Follow a request of one part to its end; `push`: for whoever streams its value."""
        usage = Usage()
        async with aclosing(cast(Any, await self.run.batcher.submit(request))) as stream:
            async for piece in stream:
                if piece.finish is not None and piece.finish.reason in ("error", "abort"):
                    raise failure(piece.finish, part.step.where)
                take(part, piece, push=push)
                usage = piece.usage or usage
                part.finish = piece.finish or part.finish
        return usage

    # ---- requests -----------------------------------------------------------------------------------------

    def request(
        self, prompt: Any, params: SamplingParams, *, returning: bool = False, leaf: bool = False, **options: Any
    ) -> Submit:
        """A request of this branch, with what the program knows about what follows as hints.

        `returning`: a tool runs next, and then this branch comes back. `leaf`: one of several, of which the branch
        goes on with one at most.
        """
        self._count += 1
        read = np.asarray(self.context.read, np.int32)
        self.run.record.retokenised += len(read) - common_prefix(read, np.asarray(prompt, np.int32))
        return Submit(
            rid=f"{self.run_id}/{short_id(self.branch)}/{self._count}",
            tokens=pack_ids(prompt),
            params=params,
            hints=self._hints(returning, leaf),
            client=self.run_id,
            group=self.run_id,
            **{"stream": False, **options},
        )

    def _hints(self, returning: bool, leaf: bool) -> Hints:
        program = self.branch_id
        family = self.run.family = self.run.family or program
        following = next((s.node for s in self.steps if not isinstance(s.node, Text | RoleOpen | RoleClose)), None)
        depth = 0 if leaf else sum(isinstance(s.node, Gen | Select | ToolCall) for s in self.steps)
        return Hints(
            program_id=program,  # a branch's own, so that its end condemns its private tail and nothing else
            parent_id=family if family != program else None,
            expected_fanout=len(following.names) if isinstance(following, Fork) else 0,
            depth=min(depth, MAX_DEPTH),
            expect_return_s=self.run.tool_wait_s if returning else None,
            final=following is None and self.run.body_done and not returning,
        )

    def params(self, part: Part, index: int = 0) -> SamplingParams:
        gen = part.gen
        temperature = gen.temperature
        if temperature is None:
            temperature = self.run.temperature if gen.n == 1 else self.run.temperature or 1.0
        seed = gen.params.seed
        if seed is None or index:
            seed = self.seed(gen.name, index)
        return msgspec.structs.replace(gen.params, temperature=temperature, seed=seed)

    def seed(self, name: str, index: int = 0) -> int:
        """A seed of its own for every place of the run, the same in every run with the same seed."""
        key = f"{self.run.seed}/{self.branch}/{name}/{len(self.context.spans)}/{index}"
        return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=7).digest(), "little")

    def _note(self, request: Submit, parts: Sequence[Part], began: float, usage: Usage | None) -> None:
        prompt = np.frombuffer(request.tokens, "<i4")
        output: list[Any] = []
        for index, part in enumerate(parts):
            if index:
                output.append(np.frombuffer(request.segments[index - 1].tokens, "<i4"))
            last = index == len(parts) - 1
            ids = part.ids if last else self.kept_ids(part.ids, part.finish)[0]
            output.append(np.asarray(ids, np.int32))
        self.note("gen", tuple(part.gen.name for part in parts), parts[0].step, began, usage, prompt, output)

    def note(
        self,
        kind: str,
        names: tuple[str, ...],
        step: Step,
        began: float,
        usage: Usage | None,
        prompt: Any,
        output: Sequence[Any] = (),
        reusable: int | None = None,
    ) -> None:
        self.run.record.events.append(
            Event(
                branch=self.branch,
                kind=kind,
                names=names,
                line=step.where.line,
                start_s=began,
                end_s=self.run.now(),
                usage=usage or Usage(prompt_tokens=len(prompt)),
                prompt=prompt,
                output=np.concatenate([*output, np.zeros(0, np.int32)]).astype(np.int32),
                reusable=len(prompt) - 1 if reusable is None else reusable,
            )
        )
